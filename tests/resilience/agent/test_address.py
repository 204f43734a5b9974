"""The address of this machine, and what has it."""

from __future__ import annotations

import socket

import pytest

from resilience.agent.connections.address import find_interface, listen, own_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_has_the_addresses_that_only_this_machine_reaches(host: str) -> None:
    assert find_interface(host) == "lo"


@pytest.mark.parametrize("endpoint", ["192.0.2.99", "2001:db8::99"])
def test_interface_of_this_node_s_address_is_found(endpoint: str) -> None:
    own = own_address(endpoint)
    if own == socket.gethostname():
        pytest.skip("this machine has no way to other ones")

    interface = find_interface(own)

    assert interface in {name for _, name in socket.if_nameindex()}
    with listen(own) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, str(interface).encode())


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::1", "no.such..host"])
def test_an_address_of_another_machine_has_no_interface_here(host: str) -> None:
    assert find_interface(host) is None


def test_listening_is_on_one_address_alone() -> None:
    with listen("127.0.0.3") as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

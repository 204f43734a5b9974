"""The address of this machine, and what has it."""

from __future__ import annotations

import socket

import pytest

from resilience.agent.connections.address import (
    find_head,
    find_interface,
    listen,
    listen_at,
    own_address,
)
from tests.ports import free_ports


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_has_the_addresses_that_only_this_machine_reaches(host: str) -> None:
    assert find_interface(host) == "lo"


@pytest.mark.parametrize("endpoint", ["192.0.2.99", "2001:db8::99"])
def test_interface_of_this_node_s_address_is_found(endpoint: str) -> None:
    own = own_address([endpoint])
    if own == socket.gethostname():
        pytest.skip("this machine has no way to other ones")

    interface = find_interface(own)

    assert interface in {name for _, name in socket.if_nameindex()}
    with listen(own) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, str(interface).encode())


@pytest.mark.parametrize("host", ["203.0.113.9", "2001:db8::1", "no.such..host"])
def test_an_address_of_another_machine_has_no_interface_here(host: str) -> None:
    assert find_interface(host) is None


def test_own_address_is_one_that_others_reach_where_a_machine_knows_itself_by_loopback() -> None:
    own = own_address(["192.0.2.99"])
    if own == socket.gethostname():
        pytest.skip("this machine has no way to other ones")

    assert own_address(["127.0.1.1", "no.such..host", "192.0.2.99"]) == own
    assert own_address(["no.such..host", "127.0.0.1"]) == "127.0.0.1"


def test_each_agent_of_a_machine_listens_at_an_endpoint_of_its_own() -> None:
    """Whether or not other names resolve."""
    ports = free_ports(2)
    here = [f"127.0.0.1:{port}" for port in ports]
    endpoints = ["no.such..host:1", "203.0.113.9:1", *here]
    found = [listen_at("127.0.0.1", endpoints) for _ in range(3)]

    with found[0][0], found[1][0], found[2][0]:
        assert [index for _, index in found] == [2, 3, None]
        listening = [each.getsockname() for each, _ in found]
    assert listening[:2] == [("127.0.0.1", port) for port in ports]
    assert listening[2][1] not in ports


def test_no_name_of_another_machine_is_looked_up_where_the_own_one_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may be a thousand, and a name server may take seconds for each."""
    asked: list[object] = []
    look_up = socket.getaddrinfo

    def noted(host: str, *more: object, **named: object) -> object:
        asked.append(host)
        return look_up(host, *more, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    others = [f"pod-{number}.invalid:29500" for number in range(1000)]

    listening, index = listen_at("127.0.0.1", [*others, f"127.0.0.1:{free_ports(1)[0]}"])

    listening.close()
    assert index == 1000
    assert set(asked) == {"127.0.0.1"}


def test_listening_is_on_one_address_alone() -> None:
    with listen("127.0.0.3") as listening:
        port = listening.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_head_of_a_program_is_where_nobody_listens_at_any_address() -> None:
    host, _, port = find_head("127.0.0.1", "seed").rpartition(":")
    with listen("127.0.0.2", int(port)):
        other = find_head("127.0.0.1", "seed")

    assert (host, 20000 <= int(port) < 30000) == ("127.0.0.1", True)
    assert other != f"{host}:{port}"

"""The address of this node: which it is, on which interface, and how to listen there alone."""

from __future__ import annotations

import fcntl
import socket
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from resilience.arguments import is_loopback, parse_endpoint

_BACKLOG = 1024
_HEAD_PORTS = range(20000, 30000)
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def own_address(endpoint_hosts: Iterable[str]) -> str:
    """Return the address of this machine by which it reaches the endpoints.

    It is the first that is none of loopback, under which a machine may know its own name.
    """
    found = []
    for host in endpoint_hosts:
        try:
            family, _, _, _, target = socket.getaddrinfo(
                host, 9, type=socket.SOCK_DGRAM, proto=socket.IPPROTO_UDP
            )[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                found.append(str(probe.getsockname()[0]))
        except (OSError, UnicodeError):  # the latter for what cannot be a host's name
            continue
        if not is_loopback(found[-1]):
            return found[-1]
    return found[0] if found else socket.gethostname()


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on this host's address alone, by default on a free port."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(target, family=family, backlog=_BACKLOG)
    listening.setblocking(False)  # noqa: FBT003
    return listening


def find_head(host: str, seed: str) -> str:
    """Return HOST:PORT with a port of this machine that is free, for a program to listen at.

    The port is below those that the kernel gives to whoever asks for any.
    """
    first = zlib.crc32(seed.encode()) % len(_HEAD_PORTS)
    for port in (*_HEAD_PORTS[first:], *_HEAD_PORTS[:first]):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return f"{host}:{port}"
    return f"{host}:{_HEAD_PORTS[0]}"


def listen_at(host: str, endpoints: Sequence[str]) -> tuple[socket.socket, int | None]:
    """Return a listening socket, and the index of the endpoint that it is at.

    The first endpoint of this machine that no other agent has is taken, else a free port of `host`.
    Raises OSError where there is none.
    """
    own = listen(host)
    machine = socket.gethostname()
    own_names = {host, machine, machine.partition(".")[0]}
    pairs = [(index, *parse_endpoint(endpoint)) for index, endpoint in enumerate(endpoints)]
    # The others' names may be a thousand, and may not be known yet: each would be looked up.
    for index, name, port in sorted(pairs, key=lambda pair: pair[1] not in own_names):
        if is_loopback(host) and not is_loopback(name):
            continue
        with suppress(OSError):
            # A machine may know its own name under an address of loopback, as others do not.
            found = listen(host if _is_own_loopback(name, host) else name, port)
            own.close()
            return found, index
    return own, None


def _is_own_loopback(name: str, host: str) -> bool:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return not is_loopback(host) and all(is_loopback(str(each[4][0])) for each in found)


def find_interface(host: str) -> str | None:
    """Return the interface that has an address of this machine, None where none is known to."""
    if is_loopback(host):
        return "lo"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, None)[0]
    except (OSError, UnicodeError):
        return None
    wanted = socket.inet_pton(family, str(target[0]).partition("%")[0])
    names = [name for _, name in socket.if_nameindex()]
    if family == socket.AF_INET:
        return next((name for name in names if _ipv4_address(name) == wanted), None)
    with suppress(OSError):  # a kernel without IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            address, *_, name = line.split()
            if bytes.fromhex(address) == wanted:
                return name
    return None


def _ipv4_address(interface: str) -> bytes | None:
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]
    return None

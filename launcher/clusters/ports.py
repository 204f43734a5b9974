"""A port of this machine that nobody else takes while it is held.

The port lies outside the range that Linux hands out by itself, so only a
program that asks for this very number could take it; and two launchers cannot
ask for the same one, because each holds a name that exists once a machine.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launcher.errors import OutsideError

_LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Above those that a Slurm job makes of its number, which no other program may hold.
_PORTS = range(30_200, 65536)
_NUM_TRIES = 200


@contextmanager
def hold_port(choose: random.Random | None = None) -> Iterator[int]:
    """Choose a free port of 127.0.0.1 and keep other launchers off it while the block runs.

    The port itself is left unbound, for the program that is told its number.
    """
    numbers = choose or random.Random()
    ports = unassigned_ports(_LOCAL_RANGE.read_text("ascii"))
    for _ in range(_NUM_TRIES):
        port = numbers.choice(ports)
        with socket.socket(socket.AF_UNIX) as name:
            if _bind(name, f"\0launcher-port-{port}") and _is_free(port):
                yield port
                return
    raise OutsideError(f"no free port on 127.0.0.1 in {_NUM_TRIES} tries")


@contextmanager
def hold_ports(number: int) -> Iterator[tuple[int, ...]]:
    """Hold so many ports, as `hold_port` does with one."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(hold_port()) for _ in range(number))


def unassigned_ports(local_range: str) -> list[int]:
    """Return the ports that Linux gives to nobody unasked; all where it may give all."""
    low, high = (int(word) for word in local_range.split())
    return [port for port in _PORTS if not low <= port <= high] or list(_PORTS)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bind(probe, ("127.0.0.1", port))


def _bind(place: socket.socket, address: str | tuple[str, int]) -> bool:
    try:
        place.bind(address)
    except OSError:
        return False
    return True

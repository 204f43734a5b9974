"""This process's TCP sockets: list them, and end every wait in them.

gloo has no call that ends a blocked collective. Shutting a connection down both ways does: every
read, write or connect on it ends with an error at once. A socket is known by its inode, which is
not given twice while it lives; descriptor numbers are reused within microseconds.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

_TCP_ESTABLISHED, _TCP_SYN_SENT, _TCP_CLOSE_WAIT = 1, 2, 8
_LIVE = frozenset({_TCP_ESTABLISHED, _TCP_SYN_SENT, _TCP_CLOSE_WAIT})


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A connected or connecting socket, and the descriptor that it had."""

    inode: int
    descriptor: int


def open_sockets() -> frozenset[TcpSocket]:
    """Return this process's connected and connecting TCP sockets; no listening ones."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - half the time
        with suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with _borrow(descriptor) as borrowed:
                if _is_live_tcp(borrowed):
                    found.add(TcpSocket(os.fstat(borrowed.fileno()).st_ino, descriptor))
    return frozenset(found)


def sockets_since(before: Collection[TcpSocket]) -> frozenset[TcpSocket]:
    """Return the sockets that have been opened since `before` was taken."""
    known = {each.inode for each in before}
    return frozenset(each for each in open_sockets() if each.inode not in known)


def shut_down(sockets: Collection[TcpSocket]) -> int:
    """End every wait in these sockets; returns how many were still open.

    The owner keeps its descriptor and finds the connection ended. From any thread.
    """
    return sum(map(_shut_one_down, sockets))


def _shut_one_down(known: TcpSocket) -> bool:
    with suppress(OSError), _borrow(known.descriptor) as borrowed:
        if os.fstat(borrowed.fileno()).st_ino != known.inode:
            return False
        borrowed.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _borrow(descriptor: int) -> socket.socket:
    """Return the socket under a descriptor of our own, which nobody else closes or reuses."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _is_live_tcp(borrowed: socket.socket) -> bool:
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if borrowed.type != socket.SOCK_STREAM:
        return False
    return borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LIVE

"""How a daemon is spoken to over a socket: requests and replies, each one frame.

A frame is 4 bytes of length, big endian, and a JSON object. Descriptors travel with the
first byte of a reply. A reply says either what was asked for, or `error`, one of the
words of ERRORS, and `message`.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience.runtime.records import from_json, to_json
from resilience.tiered.errors import (
    HeldError,
    LostError,
    RefusedError,
    StaleError,
    TieredError,
    TierError,
    VaultFullError,
)

FRAME_BYTES_MAX = 16 << 20
"""No honest frame is longer; the description of 10,000 tensors takes some 2 MiB."""

FILES_MAX = 4
"""How many descriptors one frame may bring."""

ERRORS: Mapping[str, type[Exception]] = {
    "full": VaultFullError,
    "held": HeldError,
    "stale": StaleError,
    "refused": RefusedError,
    "busy": LostError,
    "tier": TierError,
    "missing": KeyError,
    "invalid": ValueError,
    "failed": TieredError,
}
"""What each word in `error` stands for."""

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(FILES_MAX * array.array("i").itemsize)


@dataclass(frozen=True, slots=True)
class Frame:
    """What the other side has said."""

    message: dict[str, Any]
    files: tuple[int, ...] = ()
    """Descriptors that came with it; the receiver's own, closed on exec."""

    def close(self) -> None:
        """Close the descriptors."""
        for each in self.files:
            os.close(each)


class FrameSocket:
    """One end of a connection. Owns the socket.

    Sends and receives one frame at a time, from one thread; `shut_down` is for any.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(
        self, message: Mapping[str, Any], *, timeout_s: float, files: Sequence[int] = ()
    ) -> None:
        """Send a frame; returns when the kernel has all of it.

        Raises TimeoutError after `timeout_s`, ConnectionError where the other side is
        gone, ValueError for a message that is too long. The connection is of no use
        after the first two.
        """
        data = to_json(message)
        _check_length(len(data), FRAME_BYTES_MAX)
        end_s = time.monotonic() + timeout_s
        rest = memoryview(_LENGTH.pack(len(data)) + data)
        if files:
            self._limit(end_s)
            rest = rest[socket.send_fds(self.socket, [rest], list(files)) :]
        self._limit(end_s)
        self.socket.sendall(rest)

    def receive(
        self, *, timeout_s: float, bytes_max: int = FRAME_BYTES_MAX, takes_files: bool = False
    ) -> Frame:
        """Return the next frame, whose files the caller has to close.

        Raises TimeoutError where it is not whole after `timeout_s`, ConnectionError where
        the other side is gone, and ValueError for what is no frame or longer than
        `bytes_max`. The connection is of no use after any of them. Descriptors that
        nobody wants are closed by the kernel.
        """
        end_s = time.monotonic() + timeout_s
        head, files = self._receive_head(end_s, takes_files=takes_files)
        try:
            (length,) = _LENGTH.unpack(head + self._receive_exactly(4 - len(head), end_s))
            _check_length(length, bytes_max)
            return Frame(_parse(self._receive_exactly(length, end_s)), files)
        except BaseException:
            Frame({}, files).close()
            raise

    def shut_down(self) -> None:
        """End whatever waits on this connection, in any thread."""
        with suppress(OSError):  # the other side was quicker
            # Not TLS's own, which takes its state from under the thread that waits.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _receive_head(self, end_s: float, *, takes_files: bool) -> tuple[bytes, tuple[int, ...]]:
        """Return the first of the four bytes, and the descriptors that came with them."""
        self._limit(end_s)
        files: tuple[int, ...] = ()
        if not takes_files:
            head = self.socket.recv(4)
        else:
            # Not recv_fds, which drops its flags: children would inherit the descriptors.
            head, ancillary, _, _ = self.socket.recvmsg(
                4, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            files = _descriptors(ancillary)
        if not head:
            raise ConnectionError("the other side has ended the connection")
        return head, files

    def _receive_exactly(self, size: int, end_s: float) -> bytes:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            self._limit(end_s)
            received = self.socket.recv_into(rest)
            if not received:
                raise ConnectionError("the other side has ended the connection within a frame")
            rest = rest[received:]
        return bytes(data)

    def _limit(self, end_s: float) -> None:
        self.socket.settimeout(rest_until(end_s))


def rest_until(end_s: float) -> float:
    """Return the seconds until a time; raises TimeoutError where none are left."""
    rest_s = end_s - time.monotonic()
    if rest_s <= 0:
        raise TimeoutError("the other side was too slow")
    return rest_s


def limit_wait(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Set how long the kernel waits: a wait then takes no further system call."""
    microseconds = max(1, int(timeout_s * 1e6))
    value = struct.pack("@ll", *divmod(microseconds, 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, option, value)


def find_answer(session: object, request: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return the method of a session for a request, `_do_` and its op; ValueError without one."""
    op = request.get("op")
    answer = getattr(session, f"_do_{op}", None) if isinstance(op, str) else None
    if answer is None:
        raise ValueError(f"no request: op {op!r:.40}")
    found: Callable[[Mapping[str, Any]], Any] = answer
    return found


def describe_error(error: Exception) -> dict[str, str]:
    """Return an error as the reply that brings it to the other side."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    for word, kind in ERRORS.items():
        if isinstance(error, kind):
            return {"error": word, "message": text}
    return {"error": "failed", "message": f"{type(error).__name__}: {text}"}


def raise_error(reply: Mapping[str, Any]) -> None:
    """Raise what a reply says went wrong; a no-op for one that brings a result."""
    if "error" in reply:
        kind = ERRORS.get(str(reply["error"]), TieredError)
        raise kind(str(reply.get("message", "")))


def _check_length(length: int, bytes_max: int) -> None:
    if length > bytes_max:
        raise ValueError(f"a frame of {length} bytes is longer than {bytes_max}")


def _parse(data: bytes) -> dict[str, Any]:
    message = from_json(data)
    if not isinstance(message, dict):
        raise ValueError(f"no JSON object: {data[:40]!r}")  # noqa: TRY004 - a wrong value
    return message


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    files = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return tuple(files)


def read_peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end; 0 for a process that is not seen here."""
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user


def check_owner(connection: socket.socket, path: Path) -> None:
    """Raise RefusedError where another user listens: the token is not for everybody."""
    _, user = read_peer(connection)
    if user not in (0, os.geteuid()):
        raise RefusedError(
            f"user {user} listens at {path}, and not this user ({os.geteuid()}) or root; "
            "nothing was said to it"
        )

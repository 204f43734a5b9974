"""One connection of the HTTP door: bytes in, bytes out, each with a deadline.

The socket blocks, with the kernel's own timeouts: to wait costs no further system call.
A body goes from the socket to where it stays, and is hashed while it is in the core's
cache; a held shard goes from there to the socket.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

import xxhash

from resilience.runtime.http_messages import (
    HttpError,
    Request,
    format_answer,
    format_head,
    measure_head,
    parse_head,
)
from resilience.runtime.server import Way
from resilience.tiered.frames import limit_wait
from resilience.tiered.shard import PIECE_BYTES

_BLOCK_BYTES = 512 << 10
"""Received, then hashed: it has to stay in a core's own cache, and divides a piece."""
_SEND_BYTES = 16 << 20
"""Sent at once; the deadline is looked at in between."""
_SEND_BUFFER_BYTES = 4 << 20
"""The client reads some kilobytes at a time: with less, each of them would wake the sender."""
_SCRATCH_BYTES = 64 << 10
_HEAD_READ_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one connection may take."""

    connections_max: int = 512
    """More are answered 503 and closed."""
    head_bytes_max: int = 32 << 10
    idle_s: float = 60.0
    """How long a connection may wait for its next request."""
    head_s: float = 10.0
    """How long the head of a request may take, from its first byte."""
    stall_s: float = 20.0
    """How long not one byte of a body may move, in either direction."""
    bytes_per_s_min: int = 4 << 20
    """A body may take twice `stall_s` and as long as it takes at this rate, no longer."""
    drain_s: float = 30.0
    """How long a refused body is read, so that its sender gets to the answer."""
    write_wait_s: float = 10.0
    """How long one waits for who writes the same shard already."""
    num_spaces_max: int = 1024


class FirstRequest(Way):
    """The way of a new connection, which ends with the head of a request that waits to be read.

    `refuse` is called with that head. It returns the answer to a stranger, with which the
    connection ends, or nothing.
    """

    def __init__(
        self, connection: socket.socket, limits: Limits, refuse: Callable[[bytes], bytes]
    ) -> None:
        super().__init__(connection)
        self._bytes_max = limits.head_bytes_max
        self._refuse = refuse
        self._is_refused = False
        self._num_wanted = 1

    def advance(self) -> bool:
        """See `Way`; raises OSError where the other end has ended."""
        if self._is_refused:
            return super().advance()
        data = self.socket.recv(self._bytes_max + 1, socket.MSG_PEEK)
        if len(data) < self._num_wanted:
            raise ConnectionError("it has ended the connection")
        size = measure_head(data, self._bytes_max)
        # What was only looked at does not wake the process again.
        self._num_wanted = 1 if size else len(data) + 1
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._num_wanted)
        if size and (answer := self._refuse(data[:size])):
            self._is_refused = True
            self.socket.send(answer)
            # To close over what was not read would throw the answer away.
            self.socket.shutdown(socket.SHUT_WR)
        return bool(size) and not self._is_refused


class ClosedError(Exception):
    """The other end is gone, or takes nothing any more."""


class Connection:
    """One client's connection; the socket is the caller's to close. One thread."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._socket = connection
        self._limits = limits
        self._buffer = bytearray()
        """What came behind the head that was read last."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        limit_wait(connection, socket.SO_SNDTIMEO, limits.stall_s)

    def read_request(self) -> Request | None:
        """Return the head of the next request; None where the other end has ended.

        Raises HttpError: 408 where the head does not come in time, 431 for one too large.
        """
        bytes_max = self._limits.head_bytes_max
        wait_s = self._limits.idle_s
        deadline_s: float | None = None
        while not (size := measure_head(self._buffer, bytes_max)):
            if self._buffer:
                deadline_s = deadline_s or time.monotonic() + self._limits.head_s
                wait_s = deadline_s - time.monotonic()
            data = self._receive(wait_s)
            if data is None and not self._buffer:
                return None
            if data is None:
                raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time")
            if not data:
                return None
            self._buffer += data
        head = bytes(self._buffer[:size])
        del self._buffer[:size]
        return parse_head(head, bytes_max)

    def receive_into(self, memory: memoryview) -> tuple[bytes, tuple[int, ...]]:
        """Fill the memory with the body; returns its xxh3_128 and the xxh3_64 of each piece.

        Raises HttpError 408 where it does not come in time, ClosedError where it ends early.
        """
        whole, piece = xxhash.xxh3_128(), xxhash.xxh3_64()
        checksums: list[int] = []
        done, total = 0, len(memory)
        deadline_s = self._body_deadline_s(total)
        while done < total:
            end = min(total, done + _BLOCK_BYTES - done % _BLOCK_BYTES)
            block = memory[done:end]
            size = self._fill(block, deadline_s)
            whole.update(block[:size])
            piece.update(block[:size])
            done += size
            if done % PIECE_BYTES == 0 or done == total:
                checksums.append(piece.intdigest())
                piece.reset()
        return whole.digest(), tuple(checksums)

    def hash_body(self, num_bytes: int) -> bytes:
        """Read a body that is not kept; returns its xxh3_128. Raises as `receive_into` does."""
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        whole = xxhash.xxh3_128()
        deadline_s = self._body_deadline_s(num_bytes)
        while num_bytes > 0:
            size = self._fill(scratch[:num_bytes], deadline_s)
            whole.update(scratch[:size])
            num_bytes -= size
        return whole.digest()

    def ask_for_body(self) -> None:
        """Tell a client that waits for it that its body is wanted."""
        self._send(format_head(HTTPStatus.CONTINUE, [], 0))

    def answer(
        self, status: HTTPStatus, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Send an answer."""
        self._send(format_answer(status, body, headers))

    def answer_memory(self, memory: memoryview, headers: Sequence[tuple[str, str]]) -> None:
        """Send an answer whose body is a held shard."""
        self._send(format_head(HTTPStatus.OK, headers, len(memory)), socket.MSG_MORE)
        deadline_s = self._body_deadline_s(len(memory))
        while memory:
            try:
                # Not sendfile: pages of memory one by one take longer than a copy of many.
                memory = memory[self._socket.send(memory[:_SEND_BYTES]) :]
            except OSError as error:
                raise ClosedError from error
            if time.monotonic() > deadline_s:
                raise ClosedError

    def end(self) -> None:
        """Say that nothing follows, and read on for a while, so that the answer is not lost.

        To close over bytes that nobody has read would throw away an answer on its way.
        """
        deadline_s = time.monotonic() + self._limits.drain_s
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (wait_s := deadline_s - time.monotonic()) > 0:
                if not self._receive(wait_s):
                    return

    def _body_deadline_s(self, num_bytes: int) -> float:
        limits = self._limits
        return time.monotonic() + 2 * limits.stall_s + num_bytes / limits.bytes_per_s_min

    def _fill(self, block: memoryview, deadline_s: float) -> int:
        """Receive into the block what there is, at best all of it; at least one byte."""
        if self._buffer:
            size = min(len(self._buffer), len(block))
            block[:size] = self._buffer[:size]
            del self._buffer[:size]
            return size
        wait_s = min(self._limits.stall_s, deadline_s - time.monotonic())
        if wait_s > 0:
            limit_wait(self._socket, socket.SO_RCVTIMEO, wait_s)
            try:
                size = self._socket.recv_into(block, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                size = -1
            except OSError as error:
                raise ClosedError from error
            if size > 0:
                return size
            if size == 0:
                raise ClosedError
        raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "the body did not come in time")

    def _receive(self, wait_s: float) -> bytes | None:
        """Return what comes next, empty at the end; None where nothing comes in time."""
        if wait_s <= 0:
            return None
        limit_wait(self._socket, socket.SO_RCVTIMEO, wait_s)
        try:
            return self._socket.recv(_HEAD_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _send(self, data: bytes, flags: int = 0) -> None:
        try:
            self._socket.sendall(data, flags)
        except OSError as error:
            raise ClosedError from error

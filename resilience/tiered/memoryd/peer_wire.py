"""A connection between two daemons: what frames say, and the bytes of shards between them.

    dialer                                 listener
    TLS where it is asked for, and then the door of resilience.runtime
    hello{node, address, boot, ...}        {node, version}
    inventory{copies, jobs, is_first}      {}
    changes{new, gone, jobs}               {}
    ping{}                                 {}
    push{shard, job, origin}               {is_held: true}, or {is_held: false} and then
      all bytes                            {bad: [pieces]}
      the bad pieces again, once           {bad: [pieces]}
                                           {} when it is committed
    fetch{shard, job}                      {shard} and all bytes
      done{}

A shard's bytes go from memory to the socket, and from there to the other's memory; each
piece is hashed as it comes, while it is in a core's cache.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest
from typing import Any

import xxhash

from resilience.arguments import parse_endpoint
from resilience.runtime.records import read_record
from resilience.tiered.catalog import Copy, Number, StepAt
from resilience.tiered.frames import FrameSocket, limit_wait, raise_error
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.paths import step_key
from resilience.tiered.shard import ShardId, ShardMeta, decode_meta, encode_meta, piece_bounds
from resilience.tiered.vault import Reading

VERSION = 3
REPLY_TIMEOUT_S = 20.0
"""How long an answer may take that needs no memory to be made."""
TRIES = 2
"""How often a piece is sent before it is refused."""

ROWS_MAX = 4096
"""How many copies one frame names."""

_BLOCK_BYTES = 512 << 10
"""Sent at once; received, then hashed; divides a piece."""
_BYTES_PER_S_MIN = 4 << 20
"""A shard may take no longer than at this rate."""
_NEW_BYTES_PER_S = 128 << 20
"""How fast memory is made on a busy machine."""

_NICE = 10
"""How far copies to other nodes stand back behind workers; they still get a tenth of a core."""

OnBlock = Callable[[], None]


class PeerSocket(FrameSocket):
    """A connection that also carries bytes. Sends from one thread.

    No byte moves for `stall_s`: the connection is of no use any more (TimeoutError).
    """

    def __init__(self, connection: socket.socket, *, stall_s: float) -> None:
        super().__init__(connection)
        self._stall_s = stall_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            limit_wait(connection, option, stall_s)
        self._is_plain = not isinstance(connection, ssl.SSLSocket)

    def ask(
        self, message: Mapping[str, Any], *, timeout_s: float = REPLY_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send a request and return its reply; raises what the other side says went wrong."""
        self.send(message, timeout_s=timeout_s)
        reply = self.receive(timeout_s=timeout_s).message
        raise_error(reply)
        return reply

    def begin_bytes(self, num_bytes: int) -> float:
        """Make ready for that many bytes; returns when they have to be there."""
        # The kernel's own timeouts then hold, without a system call for each wait.
        self.socket.settimeout(None if self._is_plain else self._stall_s)
        return time.monotonic() + 2 * self._stall_s + num_bytes / _BYTES_PER_S_MIN

    def send_bytes(self, reading: Reading, begin: int, end: int, deadline_s: float) -> None:
        """Send a part of a shard."""
        memory = reading.memory
        while begin < end:
            try:
                # Not sendfile: pages of memory one by one take longer than a copy of many.
                begin += self.socket.send(memory[begin : min(end, begin + _BLOCK_BYTES)])
            except BlockingIOError:
                raise TimeoutError("the other side was too slow") from None
            _check(deadline_s)

    def receive_bytes(self, memory: memoryview, deadline_s: float, on_block: OnBlock) -> int:
        """Fill the memory and return the xxh3_64 of what came."""
        digest, done = xxhash.xxh3_64(), 0
        for size in self._blocks(memory, deadline_s, on_block):
            digest.update(memory[done : done + size])
            done += size
        return digest.intdigest()

    def fill(self, memory: memoryview, deadline_s: float) -> None:
        """Fill the memory."""
        for _ in self._blocks(memory, deadline_s, lambda: None):
            pass

    def _blocks(self, memory: memoryview, deadline_s: float, on_block: OnBlock) -> Iterator[int]:
        flags = socket.MSG_WAITALL if self._is_plain else 0
        done, total = 0, len(memory)
        while done < total:
            block = memory[done : min(total, done + _BLOCK_BYTES)]
            try:
                size = self.socket.recv_into(block, 0, flags)
            except BlockingIOError:
                raise TimeoutError("the other side was too slow") from None
            if not size:
                raise ConnectionError("the other side has ended the connection within a shard")
            on_block()
            _check(deadline_s)
            yield size
            done += size


def step_back() -> None:
    """Let this thread wait for the workers where cores are few: they may be copying a step."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a sandbox may forbid it
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)


def describe_shard(meta: ShardMeta) -> dict[str, Any]:
    """Return a description for a frame, with a sum over it: a frame has none of its own."""
    text = encode_meta(meta)
    return {"meta": text.decode(), "sum": xxhash.xxh3_64_hexdigest(text)}


def read_shard(described: object) -> ShardMeta:
    """Read it back; raises ValueError for what is none, or was changed on its way."""
    if not isinstance(described, dict) or not isinstance(described.get("meta"), str):
        raise ValueError(f"no description of a shard: {described!r:.40}")  # noqa: TRY004
    text = described["meta"].encode(errors="replace")
    if xxhash.xxh3_64_hexdigest(text) != described.get("sum"):
        raise ValueError("the description of a shard was changed on its way")
    return decode_meta(text)


def send_shard(connection: PeerSocket, reading: Reading) -> bool:
    """Send a shard's bytes, and once more what the other side says is wrong; False if that is, too.

    The reading stays open until the other side has said that it has all: until then, its
    pages may lie in the socket.
    """
    bounds = piece_bounds(reading.meta.num_bytes)
    pieces: Sequence[int] = range(len(bounds))
    deadline_s = connection.begin_bytes(reading.meta.num_bytes)
    connection.send_bytes(reading, 0, reading.meta.num_bytes, deadline_s)
    for is_last in (False, True):
        pieces = _read_pieces(connection.receive(timeout_s=REPLY_TIMEOUT_S).message, len(bounds))
        if not pieces:
            return True
        if not is_last:
            connection.begin_bytes(0)
            for each in pieces:
                connection.send_bytes(reading, *bounds[each], deadline_s)
    return False


def receive_shard(
    connection: PeerSocket, memory: memoryview, meta: ShardMeta, on_block: OnBlock
) -> bool:
    """Fill the memory with a shard, asking once more for what is wrong; False if that is, too."""
    bounds = piece_bounds(meta.num_bytes)
    bad = list(range(len(bounds)))
    deadline_s = connection.begin_bytes(meta.num_bytes)
    for _ in range(TRIES):
        connection.begin_bytes(0)
        bad = [
            each
            for each in bad
            if connection.receive_bytes(memory[slice(*bounds[each])], deadline_s, on_block)
            != meta.checksums[each]
        ]
        connection.send({"bad": bad}, timeout_s=REPLY_TIMEOUT_S)
        if not bad:
            return True
    return False


def memory_timeout_s(num_bytes: int) -> float:
    """Return how long an answer may take that needs so much memory to be made."""
    return REPLY_TIMEOUT_S + num_bytes / _NEW_BYTES_PER_S


def _read_pieces(reply: Mapping[str, Any], num_pieces: int) -> list[int]:
    raise_error(reply)
    pieces = read_record(list[Number], reply.get("bad"), "list of pieces")
    if max(pieces, default=0) >= num_pieces:
        raise ValueError(f"no list of pieces: {max(pieces)} of {num_pieces}")
    return pieces


def _check(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise TimeoutError("the other side was too slow")


def read_copies(rows: object, place: str) -> list[Copy]:
    """Read what a node says that it holds; raises ValueError for anything else."""
    copies = read_record(list[Copy], rows, "list of shards")
    check_copies(copies)
    # No node speaks for another one.
    return [replace(each, place=place, tier="ram") for each in copies]


def check_copies(copies: Sequence[Copy]) -> None:
    """Raise ValueError where a shard has a name that no door can have made."""
    for each in copies:
        check_id(each.meta_id)


def read_id(row: object) -> ShardId:
    """Read a shard's name; raises ValueError for what is none."""
    return check_id(read_record(ShardId, row, "name of a shard"))


def read_ids(rows: object) -> list[ShardId]:
    """Read names of shards; raises ValueError for anything else."""
    return list(map(check_id, read_record(list[ShardId], rows, "list of shards")))


def check_id(shard_id: ShardId) -> ShardId:
    """Return a shard's name; raises ValueError where no door can have made it."""
    # The HTTP door's prefix is for the vault alone.
    step_key(replace(shard_id, namespace=shard_id.namespace.removeprefix(HTTP_PREFIX)))
    return shard_id


def check_step(namespace: str, at: StepAt) -> None:
    """Raise ValueError where no door can have made a step of these names."""
    check_id(ShardId(namespace=namespace, step=at.step, generation=at.generation, shard=""))


def choose_complete(complete: Mapping[str, frozenset[StepAt]]) -> dict[str, list[StepAt]]:
    """Return steps for a frame, the newest of each namespace."""
    each_max = ROWS_MAX // max(1, len(complete))
    return {name: nlargest(each_max, steps) for name, steps in complete.items()}


def read_complete(rows: object) -> dict[str, frozenset[StepAt]]:
    """Read them back; raises ValueError for anything else."""
    found = read_record(dict[str, frozenset[StepAt]], rows, "list of steps")
    for name, steps in found.items():
        for each in steps:
            check_step(name, each)
    return found


def check_address(text: str) -> None:
    """Raise ValueError unless a text says where a node listens, or is empty."""
    try:
        if text:
            parse_endpoint(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error

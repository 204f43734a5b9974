"""Places that chunks pass through between the two ranks of a transfer, in turn.

Shared memory: counters beside the places show how far each side is, so that two running sides need
no messages. Each side sends a word through the group every half ring; the word wakes a peer that
found nothing to do and sleeps in a receive. No side can sleep for ever: a source that waits has a
whole ring ready, a target that waits has taken a whole ring, and within a ring there is always a
word.

No shared memory: each chunk is a message, and each is answered by a word.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from resilience.errors import TransferError

RING = 8
"""Chunks between the two ends at a time in shared memory."""
MESSAGES = 4
"""The same without shared memory."""
MESSAGE_BYTES = 8 << 20
"""Chunk that goes through the process group; of 2 MiB, gloo takes a third longer for a GiB."""

_WORD_EVERY = RING // 2
_WORDS_AHEAD = 4
_HEAD_BYTES = 4096
_CHECKSUM_BYTES = 64
"""Room for a message's checksum; the chunk after it stays aligned."""
_TAG_READY, _TAG_USED, _TAG_CHUNK = 7110, 7111, 7120

Bytes = NDArray[np.uint8]


class RankPair:
    """Messages between the two ranks of one transfer, over a group that takes CPU tensors."""

    def __init__(self, group: ProcessGroup, *, source: int, target: int, is_source: bool) -> None:
        self.source = source
        self.target = target
        self.is_source = is_source
        self._group = group
        self._peer = target if is_source else source

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Begin to send; the tensor is left alone until the work is waited for."""
        return self._group.send([tensor], self._peer, tag)

    def receive(self, tensor: Tensor, tag: int) -> Work:
        """Begin to receive."""
        return self._group.recv([tensor], self._peer, tag)

    def __str__(self) -> str:
        return f"from rank {self.source} to rank {self.target}"


class Ring(Protocol):
    """What a transfer needs of the places; all calls in the order of the chunks."""

    chunk_bytes: int

    def open(self) -> None:
        """Target, before the source may begin: make the ring empty."""

    def acquire(self, number: int) -> Bytes:
        """Source: wait until the chunk's place is free; returns its memory.

        Raises TransferError where an earlier chunk arrived broken.
        """

    def place(self, number: int) -> Bytes:
        """Target: return the memory of a chunk that was taken."""

    def hand_over(self, number: int, checksum: int) -> None:
        """Source: the chunk is in its place."""

    def take(self, number: int) -> int:
        """Target: wait until the chunk is in its place; returns its checksum."""

    def release(self, number: int) -> None:
        """Target: the chunk is used."""

    def refuse(self, number: int) -> None:
        """Target: the chunk is broken; nothing follows."""

    def close(self) -> None:
        """Wait until the other side has done its part; raises as `acquire`."""


def make_ring(pair: RankPair, num_bytes: int, memory: memoryview | None) -> Ring:
    """Return the places for `num_bytes` in all: in shared memory, or in messages for None.

    Raises ValueError for memory that is too small for a page each.
    """
    if memory is None:
        return _MessageRing(pair, num_bytes)
    return _SharedRing(pair, num_bytes, memory)


def ring_chunk_bytes(memory: memoryview | None) -> int:
    """Return how large the chunks are that go through `memory`; raises as `make_ring`."""
    if memory is None:
        return MESSAGE_BYTES
    chunk_bytes = (len(memory) - _HEAD_BYTES) // RING // mmap.PAGESIZE * mmap.PAGESIZE
    if chunk_bytes <= 0:
        raise ValueError(f"{len(memory)} bytes have no room for {RING} chunks; enlarge the slot")
    return chunk_bytes


def chunk_sizes(num_bytes: int, chunk_bytes: int) -> list[int]:
    """Return the sizes in bytes of the chunks of a stream."""
    whole, rest = divmod(num_bytes, chunk_bytes)
    return [chunk_bytes] * whole + [rest] * bool(rest)


class _WordsOut:
    """Words to the other side: 0, or 1 more than the number of a broken chunk."""

    def __init__(self, pair: RankPair, tag: int) -> None:
        self._pair = pair
        self._tag = tag
        self._works: deque[Work] = deque()

    def send(self, word: int) -> None:
        self._works.append(self._pair.send(torch.tensor([word]), self._tag))
        if len(self._works) > 2 * _WORDS_AHEAD:
            self._works.popleft().wait()

    def close(self) -> None:
        while self._works:
            self._works.popleft().wait()


class _WordsIn:
    """Words from the other side, a known number of them; the next ones are received ahead."""

    def __init__(self, pair: RankPair, tag: int, number: int) -> None:
        self._pair = pair
        self._tag = tag
        self._num_left = number
        self._coming: deque[tuple[Tensor, Work]] = deque()
        self.num_taken = 0

    def post(self) -> None:
        while self._num_left and len(self._coming) < _WORDS_AHEAD:
            tensor = torch.zeros(1, dtype=torch.int64)
            self._coming.append((tensor, self._pair.receive(tensor, self._tag)))
            self._num_left -= 1

    def take(self) -> None:
        """Wait for the next word; raises TransferError for a broken chunk."""
        tensor, work = self._coming.popleft()
        work.wait()
        self.num_taken += 1
        self.post()
        if word := int(tensor.item()):
            raise TransferError(
                f"chunk {word - 1} {self._pair} arrived with another checksum than it was sent with"
            )

    def close(self) -> None:
        while self._coming:
            self.take()


class _SharedRing:
    """Chunks in a slot of the transfer buffer; counters and checksums lie before them.

    Each counter has one writer. A counter is written after the chunk that it
    counts; should a reader see them the other way round, the checksum tells.
    """

    def __init__(self, pair: RankPair, num_bytes: int, memory: memoryview) -> None:
        self.chunk_bytes = ring_chunk_bytes(memory)
        self._sizes = chunk_sizes(num_bytes, self.chunk_bytes)
        numbers: NDArray[np.uint64] = np.frombuffer(memory[:_HEAD_BYTES], dtype=np.uint64)
        # A cache line each.
        self._num_ready, self._num_used, self._checksums = numbers[:1], numbers[8:9], numbers[16:]
        self._bytes: Bytes = np.frombuffer(memory[_HEAD_BYTES:], dtype=np.uint8)
        num_words = -(-len(self._sizes) // _WORD_EVERY)
        own, other = (_TAG_READY, _TAG_USED) if pair.is_source else (_TAG_USED, _TAG_READY)
        self._out = _WordsOut(pair, own)
        self._in = _WordsIn(pair, other, num_words)
        self._in.post()

    def open(self) -> None:
        self._num_ready[0] = self._num_used[0] = 0

    def place(self, number: int) -> Bytes:
        begin = number % RING * self.chunk_bytes
        return self._bytes[begin : begin + self._sizes[number]]

    def acquire(self, number: int) -> Bytes:
        self._await(self._num_used, number - RING + 1)
        return self.place(number)

    def hand_over(self, number: int, checksum: int) -> None:
        self._checksums[number % RING] = checksum
        self._num_ready[0] = number + 1
        self._send_word(number)

    def take(self, number: int) -> int:
        self._await(self._num_ready, number + 1)
        return int(self._checksums[number % RING])

    def release(self, number: int) -> None:
        self._num_used[0] = number + 1
        self._send_word(number)

    def refuse(self, number: int) -> None:
        self._out.send(number + 1)
        self._out.close()

    def close(self) -> None:
        self._in.close()
        self._out.close()

    def _await(self, counter: NDArray[np.uint64], number: int) -> None:
        """Wait until the other side has counted to `number`."""
        count = int(counter[0]) if number > 0 else number
        while count < number:
            self._in.take()
            count = int(counter[0])
        # Take what must have arrived long ago, so that words do not pile up.
        while (self._in.num_taken + 2) * _WORD_EVERY <= count:
            self._in.take()

    def _send_word(self, number: int) -> None:
        if (number + 1) % _WORD_EVERY == 0 or number + 1 == len(self._sizes):
            self._out.send(0)


class _MessageRing:
    """Chunks in messages, each behind its checksum."""

    def __init__(self, pair: RankPair, num_bytes: int) -> None:
        self.chunk_bytes = ring_chunk_bytes(None)
        self._pair = pair
        self._sizes = chunk_sizes(num_bytes, self.chunk_bytes)
        room = _CHECKSUM_BYTES + min(self.chunk_bytes, num_bytes)
        self._messages = [torch.empty(room, dtype=torch.uint8) for _ in range(MESSAGES)]
        self._works: deque[Work] = deque()
        self._out = _WordsOut(pair, _TAG_USED)
        self._in = _WordsIn(pair, _TAG_USED, len(self._sizes) if pair.is_source else 0)
        self._in.post()

    def open(self) -> None:
        for number in range(min(MESSAGES, len(self._sizes))):
            self._post(number)

    def place(self, number: int) -> Bytes:
        return self._message(number).numpy()[_CHECKSUM_BYTES:]

    def acquire(self, number: int) -> Bytes:
        if number >= MESSAGES:
            self._in.take()
            self._works.popleft().wait()
        return self.place(number)

    def hand_over(self, number: int, checksum: int) -> None:
        message = self._message(number)
        message.numpy()[:8].view(np.uint64)[0] = checksum
        self._works.append(self._pair.send(message, _TAG_CHUNK))

    def take(self, number: int) -> int:
        self._works.popleft().wait()
        return int(self._message(number).numpy()[:8].view(np.uint64)[0])

    def release(self, number: int) -> None:
        if number + MESSAGES < len(self._sizes):
            self._post(number + MESSAGES)
        self._out.send(0)

    def refuse(self, number: int) -> None:
        self._out.send(number + 1)
        self._out.close()

    def close(self) -> None:
        self._in.close()
        while self._works:
            self._works.popleft().wait()
        self._out.close()

    def _post(self, number: int) -> None:
        self._works.append(self._pair.receive(self._message(number), _TAG_CHUNK))

    def _message(self, number: int) -> Tensor:
        size = _CHECKSUM_BYTES + self._sizes[number]
        return self._messages[number % MESSAGES][:size]

"""Copies a state straight out of another rank's memory, in chunks that are hashed on both sides.

The source hashes its own memory; the target hashes what it has copied, while a core's cache holds
it. Nothing here waits for the other side, or knows of messages.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

CHUNK_BYTES = 512 << 10
"""How much is copied, then hashed: it has to stay in a core's own cache."""
THREADS = 2
"""How many copy, where there are as many cores. The source's side is one thread and faster."""

Bytes = NDArray[np.uint8]
Checksums = NDArray[np.uint64]


def count_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a state."""
    return -(-num_bytes // CHUNK_BYTES)


def hash_chunks(memory: Bytes) -> Checksums:
    """Return the xxh3_64 of each chunk."""
    begins = range(0, len(memory), CHUNK_BYTES)
    digests = [xxhash.xxh3_64_intdigest(memory[n : n + CHUNK_BYTES].data) for n in begins]
    return np.array(digests, dtype=np.uint64)


def copy_chunks(
    source: Bytes, target: Bytes, on_chunk: Callable[[int], None] | None = None
) -> Checksums:
    """Copy all chunks; returns the xxh3_64 of each, read from the target's memory.

    `on_chunk` is called in this thread with the number of each chunk that it has copied; a second
    thread copies others. When the call ends with an error, no thread goes on.
    """
    checksums = np.zeros(count_chunks(len(target)), dtype=np.uint64)
    # One iterator for both: who is free takes the next.
    numbers = iter(range(len(checksums)))
    num_helpers = min(THREADS, len(checksums), len(os.sched_getaffinity(0))) - 1
    if num_helpers < 1:
        _copy(numbers, source, target, checksums, on_chunk)
        return checksums
    with ThreadPoolExecutor(num_helpers, thread_name_prefix="state-copy") as pool:
        helpers = [
            pool.submit(_copy, numbers, source, target, checksums, None) for _ in range(num_helpers)
        ]
        try:
            _copy(numbers, source, target, checksums, on_chunk)
        finally:
            deque(numbers, maxlen=0)
        for helper in helpers:
            helper.result()
    return checksums


def _copy(
    numbers: Iterator[int],
    source: Bytes,
    target: Bytes,
    checksums: Checksums,
    on_chunk: Callable[[int], None] | None,
) -> None:
    for number in numbers:
        begin = number * CHUNK_BYTES
        part = target[begin : begin + CHUNK_BYTES]
        part[:] = source[begin : begin + CHUNK_BYTES]
        checksums[number] = xxhash.xxh3_64_intdigest(part.data)
        if on_chunk is not None:
            on_chunk(number)

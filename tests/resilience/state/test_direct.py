from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from resilience.state import direct
from resilience.state.direct import copy_chunks, count_chunks, hash_chunks

CHUNK_BYTES = 64 << 10


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    number: int = request.param
    monkeypatch.setattr(direct, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(direct, "THREADS", number)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(number)))
    return number


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 40 * CHUNK_BYTES - 7])
def test_all_is_copied_and_hashed_on_both_sides(num_threads: int, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size, dtype=np.uint8)
    seen: list[int] = []

    arrived = copy_chunks(source, target, seen.append)

    assert np.array_equal(source, target)
    assert np.array_equal(arrived, hash_chunks(source))
    assert len(arrived) == count_chunks(size)
    assert seen == sorted(set(seen))
    assert num_threads > 1 or seen == list(range(len(arrived)))


def test_checksums_are_xxh3_of_each_chunk(num_threads: int) -> None:
    memory = np.arange(CHUNK_BYTES + 5, dtype=np.uint64).astype(np.uint8)

    first, last = hash_chunks(memory)

    assert first == xxhash.xxh3_64_intdigest(memory[:CHUNK_BYTES].tobytes())
    assert last == xxhash.xxh3_64_intdigest(memory[CHUNK_BYTES:].tobytes())


class StoppedError(Exception):
    pass


def test_caller_who_stops_leaves_no_thread_that_writes(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.ones(400 * CHUNK_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    is_stopping = threading.Event()
    copy = direct._copy

    def stop(number: int) -> None:
        is_stopping.set()
        raise StoppedError

    def copy_then(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            # It would copy all before the caller has copied anything.
            assert is_stopping.wait(60)
        copy(*args)

    monkeypatch.setattr(direct, "_copy", copy_then)
    with pytest.raises(StoppedError):
        copy_chunks(source, target, stop)
    left = target[::CHUNK_BYTES].copy()

    assert np.array_equal(left, target[::CHUNK_BYTES])

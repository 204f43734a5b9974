"""What an agent knows of one process."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from resilience.agent.processes.worker import Worker
from resilience.comm.messages import OTHER_SHARD_STATUS, StoreReply


@pytest.fixture
def worker() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Worker(number=0, slot=0, socket=ours, outputs={})


@pytest.mark.parametrize(
    ("shards", "status", "reason"),
    [
        pytest.param(["a", "b"], OTHER_SHARD_STATUS, "other shard", id="another-shard"),
        pytest.param(["a", "a"], OTHER_SHARD_STATUS, "died", id="the-same-shard"),
        pytest.param(["a"], OTHER_SHARD_STATUS, "died", id="its-first-shard"),
        pytest.param(["a", "b"], 1, "died", id="another-status"),
        pytest.param(["a", "b", "b"], OTHER_SHARD_STATUS, "died", id="in-a-later-generation"),
    ],
)
def test_only_a_process_with_another_shard_than_its_own_ends_as_planned(
    worker: Worker, shards: list[str], status: int, reason: str
) -> None:
    """A program that ends with this status again and again is given up like any other."""
    for generation, shard in enumerate(shards):
        worker.enter(0, generation, shard)
    worker.status = status

    assert worker.end_reason == reason


def test_last_words_are_the_last_line_with_words(worker: Worker) -> None:
    """A torchrun that a worker starts draws a line below what it says. Or an exception's first."""
    worker.note_errors([b"Root Cause", b"  Signal 9 (SIGKILL) received", b"=====", b""])

    assert worker.last_words == "Signal 9 (SIGKILL) received"
    worker.note_errors([b"Traceback (most recent call last):", b"  x()", b"E: CUDA", b"Compile"])
    assert worker.last_words == "E: CUDA"


def test_a_worker_is_killed_for_a_message_that_cannot_be_read_and_its_end_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(number=0, slot=0, socket=ours, outputs={})
        theirs.sendall(b"hello\n")
        assert worker.read() is None
    worker.status = -signal.SIGKILL

    why = "its agent cannot read its message: no message: b'hello'"
    assert worker.describe_end(" in step 3") == f"was killed by SIGKILL in step 3: {why}"


def test_threads_of_a_worker_may_all_ask_for_a_large_value(worker: Worker) -> None:
    for number in range(5):
        value = "x" * (21 << 20)
        worker.send(StoreReply(generation=0, number=number, worker=0, values=(value,)))

    assert worker.killed_s == float("inf")

"""Which SIGTERM a worker obeys."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from recipes_training.stop import EXIT_STATUS, StopSignal
from resilience.comm.page import Page, create_page
from tests.recipes_training.test_environment import make_handles

SLOT, NUM_SLOTS = 1, 2


@pytest.fixture
def file() -> Iterator[int]:
    file = create_page(NUM_SLOTS)
    yield file
    os.close(file)


@pytest.fixture
def page(file: int) -> Iterator[Page]:
    """What the agent writes in."""
    page = Page(file, NUM_SLOTS)
    yield page
    page.close()


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal()
    stop.install()
    yield stop
    signal.signal(signal.SIGTERM, before)


def start_by_agent(file: int, patch: pytest.MonkeyPatch, *, recovers: bool = True) -> None:
    """Have this process be a worker."""
    handles = make_handles(
        page_file=file, slot=SLOT, num_slots=NUM_SLOTS, agent_pid=os.getpid(), recovers=recovers
    )
    for name, value in handles.variables().items():
        patch.setenv(name, value)


def test_worker_obeys_its_agent_alone(
    file: int, page: Page, stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_by_agent(file, monkeypatch)
    page.ask_to_end(SLOT - 1)
    signal.raise_signal(signal.SIGTERM)
    stop.defer()
    signal.raise_signal(signal.SIGTERM)
    assert not stop.is_requested
    stop.release()

    page.ask_to_end(SLOT)

    with pytest.raises(SystemExit) as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == EXIT_STATUS


def test_worker_without_recovery_obeys_everybody(
    file: int, stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_by_agent(file, monkeypatch, recovers=False)
    stop.defer()

    signal.raise_signal(signal.SIGTERM)

    assert stop.is_requested


def test_child_of_a_worker_may_be_ended_by_it(
    file: int, stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_by_agent(file, monkeypatch)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if not child:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.pause()
        except SystemExit:
            os._exit(EXIT_STATUS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    os.kill(child, signal.SIGTERM)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == EXIT_STATUS

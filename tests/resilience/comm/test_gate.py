from __future__ import annotations

import threading
from typing import get_args

import pytest
import torch

from resilience.comm.gate import Gate
from resilience.errors import BrokenError
from resilience.testing.async_group import AsyncChannel, AsyncWorld, Garbage
from tests.resilience.comm.gate_worlds import (
    EXPECTED,
    WatchedLock,
    last_was_aborted_before,
    run_over_gloo,
    run_over_threads,
)
from tests.resilience.rank_processes import TIMEOUT_S

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
GARBAGE = get_args(Garbage)
SCENARIOS = [pytest.param(each, id=each.__name__) for each in EXPECTED]
STEP = 3
SHARE = torch.tensor([1, STEP, STEP**2])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gate_over_gloo(scenario, tmp_path):
    assert run_over_gloo(scenario, str(tmp_path)) == EXPECTED[scenario]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gate_over_asynchronous_queues(scenario, garbage):
    assert run_over_threads(scenario, garbage) == EXPECTED[scenario]


@pytest.mark.parametrize("seed", range(10))
def test_nobody_passes_a_gate_that_somebody_never_entered(seed):
    outcomes = run_over_threads(last_was_aborted_before, "stale", seed)

    assert outcomes == EXPECTED[last_was_aborted_before]


class Rank:
    """Rank 0 of two, whose peer is moved by the test; its generation ends by `abort`."""

    def __init__(self, world, gate=None):
        self.group, self.peer = world.groups
        self.looked = threading.Event()
        self.lock = WatchedLock(self.looked)
        self.generation_is_current = True
        self.gate = gate or Gate(AsyncChannel(self.group), world_size=2)

    def is_current(self):
        self.looked.set()
        return self.generation_is_current

    def enter(self, step=STEP):
        try:
            self.gate.enter(step, lock=self.lock, is_current=self.is_current)
        except BrokenError as error:
            return str(error)
        return "passed"

    def pass_once(self):
        """Leave the sum of a gate that was passed behind."""
        self.peer.all_reduce(SHARE.clone())
        assert self.enter() == "passed"

    def enter_while(self, event):
        """Enter with the peer away, and let `event` happen once the queue waits for it."""

        def watch():
            self.group.wait_until_waiting(TIMEOUT_S)
            event()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        outcome = self.enter()
        watcher.join(TIMEOUT_S)
        return outcome

    def abort_before_the_flag_falls(self):
        """Abort as one may: the queue ends over garbage while the generation looks current."""
        with self.lock:
            self.looked.clear()
            self.group.abort()
            assert self.looked.wait(TIMEOUT_S)
            self.generation_is_current = False


@pytest.mark.parametrize("garbage", GARBAGE)
def test_aborted_gate_is_not_passed_whatever_it_leaves(garbage):
    with AsyncWorld(2, garbage=garbage) as world:
        rank = Rank(world)
        rank.pass_once()

        outcome = rank.enter_while(rank.abort_before_the_flag_falls)

    assert outcome == f"the generation ended in the gate of step {STEP}"


@pytest.mark.parametrize("garbage", ["random", "untouched"])
def test_gate_that_breaks_by_itself_is_not_passed(garbage):
    """A communicator may be aborted by its own watchdog, of which the generation knows nothing."""
    with AsyncWorld(2, garbage=garbage) as world:
        rank = Rank(world)
        rank.pass_once()

        outcome = rank.enter_while(rank.group.abort)

    assert outcome.startswith(f"the gate of step {STEP} counts ")


def test_gate_over_too_few_ranks_is_not_passed():
    with AsyncWorld(2) as world:
        rank = Rank(world, Gate(AsyncChannel(world.groups[0]), world_size=4))
        rank.peer.all_reduce(SHARE.clone())

        outcome = rank.enter()

    assert outcome == "the gate of step 3 counts 2 ranks with a sum of steps of 6, not 4 with 12"


def test_gate_of_an_ended_generation_sends_nothing():
    with AsyncWorld(2) as world:
        rank = Rank(world)
        rank.generation_is_current = False

        outcome = rank.enter()
        rank.peer.all_reduce(SHARE.clone())

        assert outcome == "the generation had ended before the gate of step 3"
        assert rank.peer.settle(TIMEOUT_S), "the peer waits for the rank"


def test_gate_that_takes_too_long_is_broken():
    with AsyncWorld(2) as world:
        rank = Rank(world, Gate(AsyncChannel(world.groups[0], timeout_s=0.0), world_size=2))

        outcome = rank.enter()

    assert outcome == "the gate of step 3 broke: rank 0's queue is not done after 0.0 s"

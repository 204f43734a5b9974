"""Ranks at a gate, which communicate over threads or over processes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from resilience.comm.gate import Gate, GateChannel, GroupChannel
from resilience.comm.leaders import LeaderGroup
from resilience.comm.sockets import open_sockets, shut_down, sockets_since
from resilience.errors import BrokenError, StateError
from resilience.testing.async_group import AsyncChannel, AsyncWorld, Garbage
from tests.resilience.rank_processes import CONTEXT, TIMEOUT_S, run_ranks

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1
NAMES = [
    f"{what}-{rank}"
    for what in ("opened", "entered", "summed", "passed", "done")
    for rank in range(WORLD_SIZE)
]


class WatchedLock:
    """A lock that tells when somebody wants it."""

    def __init__(self, wanted: threading.Event) -> None:
        self.wanted = wanted
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Seat:
    """One rank with its gate, and signals that all ranks share."""

    def __init__(
        self,
        rank: int,
        channel: GateChannel,
        signals: Mapping[str, Any],
        *,
        break_channel: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.signals = signals
        self.lock = WatchedLock(threading.Event())
        self.is_current = True
        self.after_sum: Callable[[], None] = lambda: None
        self.break_channel = break_channel
        self._channel = channel
        self._gate = Gate(self, world_size=WORLD_SIZE)

    def reduce(self, buffer: Tensor) -> None:
        self.signals[f"entered-{self.rank}"].set()
        self._channel.reduce(buffer)
        self.signals[f"summed-{self.rank}"].set()
        self.after_sum()

    def enter(self, step: int) -> str:
        try:
            self._gate.enter(step, lock=self.lock, is_current=lambda: self.is_current)
        except BrokenError:
            return "broken"
        return "passed"

    def abort(self) -> None:
        with self.lock:
            self.is_current = False
            self.break_channel()

    def await_all(self, what: str, *, but: int | None = None) -> None:
        for rank in range(WORLD_SIZE):
            assert rank == but or self.signals[f"{what}-{rank}"].wait(TIMEOUT_S), f"{what}-{rank}"

    def enter_until(self, what: str, *, but: int, step: int = 0) -> str:
        """Enter, and be aborted by another thread once the others have got to `what`."""

        def watch() -> None:
            self.await_all(what, but=but)
            self.abort()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        outcome = self.enter(step)
        watcher.join()
        return outcome


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (1, 1, 2), (2, 1, 3)], ids=str)
def test_ranks_at_different_places_of_their_program_are_told_apart(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each rank, also where its own place is the mean of all."""
    monkeypatch.setattr(zlib, "crc32", int)
    sums: list[Tensor] = []

    class Told:
        def reduce(self, buffer: Tensor) -> None:
            given.append(buffer.clone())
            buffer.copy_(sum(sums) if sums else buffer)  # type: ignore[arg-type]

    def enter(number: int) -> str:
        try:
            gate.enter(7, lock=threading.Lock(), is_current=lambda: True, place=str(number))
        except (StateError, BrokenError) as error:
            return str(error)
        return "passed"

    given: list[Tensor] = []
    gate = Gate(Told(), world_size=len(numbers))
    for each in numbers:
        enter(each)
    sums += given

    for each in numbers:
        assert enter(each).startswith(f"this rank is at {each}, and another rank is not")
    sums[:] = [given[0]] * len(numbers)
    assert enter(numbers[0]) == "passed"


def all_enter(seat: Seat) -> list[str]:
    return [seat.enter(step) for step in range(3)]


def last_stays_away(seat: Seat) -> list[str]:
    """The others are aborted once all of them are in the gate."""
    if seat.rank == LAST:
        seat.await_all("entered", but=LAST)
        return ["away"]
    return [seat.enter_until("entered", but=LAST)]


def last_was_aborted_before(seat: Seat) -> list[str]:
    if seat.rank == LAST:
        seat.abort()
        return [seat.enter(0)]
    return [seat.enter_until("entered", but=LAST)]


def last_is_aborted_with_the_sum_there(seat: Seat) -> list[str]:
    """The sum is right, but no rank may read it any more."""

    def abort() -> None:
        seat.await_all("summed")
        seat.abort()

    if seat.rank == LAST:
        seat.after_sum = abort
    return [seat.enter(0)]


def last_meets_abort_at_the_lock(seat: Seat) -> list[str]:
    """The abort holds the lock already when the rank comes to read the sum."""
    is_held = threading.Event()

    def abort_slowly() -> None:
        seat.await_all("summed")
        with seat.lock:
            seat.lock.wanted.clear()
            is_held.set()
            seat.lock.wanted.wait(TIMEOUT_S)
            seat.is_current = False
            seat.break_channel()

    def begin_abort() -> None:
        threading.Thread(target=abort_slowly, daemon=True).start()
        is_held.wait(TIMEOUT_S)

    if seat.rank == LAST:
        seat.after_sum = begin_abort
    return [seat.enter(0)]


def all_are_aborted_after(seat: Seat) -> list[str]:
    outcome = seat.enter(0)
    seat.signals[f"passed-{seat.rank}"].set()
    seat.await_all("passed")
    seat.abort()
    return [outcome, seat.enter(1)]


def generation_ends_without_abort(seat: Seat) -> list[str]:
    def end() -> None:
        seat.is_current = seat.rank != LAST

    seat.after_sum = end
    return [seat.enter(0)]


def steps_differ(seat: Seat) -> list[str]:
    return [seat.enter(5 if seat.rank == LAST else 4)]


def steps_only_add_up(seat: Seat) -> list[str]:
    """4 + 6 + 5 is 3 * 5."""
    return [seat.enter((4, 6, 5)[seat.rank])]


EXPECTED: dict[Callable[[Seat], list[str]], list[list[str]]] = {
    all_enter: [["passed"] * 3] * 3,
    last_stays_away: [["broken"], ["broken"], ["away"]],
    last_was_aborted_before: [["broken"]] * 3,
    last_is_aborted_with_the_sum_there: [["passed"], ["passed"], ["broken"]],
    last_meets_abort_at_the_lock: [["passed"], ["passed"], ["broken"]],
    all_are_aborted_after: [["passed", "broken"]] * 3,
    generation_ends_without_abort: [["passed"], ["passed"], ["broken"]],
    steps_differ: [["broken"]] * 3,
    steps_only_add_up: [["broken"]] * 3,
}


def run_over_gloo(
    scenario: Callable[[Seat], list[str]], folder: str, num_local_ranks: int = 0
) -> list[list[str]]:
    """Run it over one group, or with a number of local ranks over leaders of nodes."""
    signals = {name: CONTEXT.Event() for name in NAMES}
    return run_ranks(_sit_over_gloo, WORLD_SIZE, scenario, folder, signals, num_local_ranks)


def _sit_over_gloo(
    rank: int,
    world_size: int,
    scenario: Callable[[Seat], list[str]],
    folder: str,
    signals: Mapping[str, Any],
    num_local_ranks: int,
) -> list[str]:
    import torch.distributed as dist

    before, has_ended = open_sockets(), threading.Event()
    store = dist.FileStore(f"{folder}/store", world_size)
    if num_local_ranks:
        group: Any = LeaderGroup(
            store,
            rank=rank,
            world_size=world_size,
            num_local_ranks=num_local_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
            collective_timeout=timedelta(seconds=TIMEOUT_S),
            opening=nullcontext,
            is_broken=has_ended.is_set,
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        group = dist.group.WORLD

    def break_channel() -> None:
        has_ended.set()
        shut_down(sockets_since(before))

    seat = Seat(rank, GroupChannel(group), signals, break_channel=break_channel)
    try:
        signals[f"opened-{rank}"].set()
        seat.await_all("opened")
        return scenario(seat)
    finally:
        # A rank that ends closes its connections, which other ranks may still use.
        signals[f"done-{rank}"].set()
        seat.await_all("done")


def run_over_threads(
    scenario: Callable[[Seat], list[str]], garbage: Garbage, seed: int = 0
) -> list[list[str]]:
    signals = {name: threading.Event() for name in NAMES}
    outcomes: list[list[str]] = [["hangs"]] * WORLD_SIZE
    with AsyncWorld(WORLD_SIZE, seed=seed, garbage=garbage) as world:

        def sit(rank: int) -> None:
            channel = AsyncChannel(world.groups[rank], timeout_s=TIMEOUT_S)
            outcomes[rank] = scenario(Seat(rank, channel, signals, break_channel=channel.abort))

        threads = [
            threading.Thread(target=sit, args=(rank,), daemon=True) for rank in range(WORLD_SIZE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    return outcomes


pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
GARBAGE = get_args(Garbage)
SCENARIOS = [pytest.param(each, id=each.__name__) for each in EXPECTED]
STEP = 3
SHARE = torch.tensor([1, STEP, STEP**2, 0, 0])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gate_over_gloo(scenario, tmp_path):
    assert run_over_gloo(scenario, str(tmp_path)) == EXPECTED[scenario]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gate_over_leaders(scenario, tmp_path):
    assert run_over_gloo(scenario, str(tmp_path), num_local_ranks=2) == EXPECTED[scenario]


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

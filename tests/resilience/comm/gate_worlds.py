"""What ranks do at a gate, whatever they communicate over: threads or processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from resilience.comm.gate import Gate, GateChannel, GroupChannel
from resilience.comm.sockets import open_sockets, shut_down, sockets_since
from resilience.errors import BrokenError
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
    """The sum is right, but nobody may read it any more."""

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


def run_over_gloo(scenario: Callable[[Seat], list[str]], folder: str) -> list[list[str]]:
    signals = {name: CONTEXT.Event() for name in NAMES}
    return run_ranks(_sit_over_gloo, WORLD_SIZE, scenario, folder, signals)


def _sit_over_gloo(
    rank: int,
    world_size: int,
    scenario: Callable[[Seat], list[str]],
    folder: str,
    signals: Mapping[str, Any],
) -> list[str]:
    import torch.distributed as dist

    before = open_sockets()
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    def break_channel() -> None:
        shut_down(sockets_since(before))

    seat = Seat(rank, GroupChannel(dist.group.WORLD), signals, break_channel=break_channel)
    try:
        signals[f"opened-{rank}"].set()
        seat.await_all("opened")
        return scenario(seat)
    finally:
        # Whoever ends takes its connections along, which others may not be done with.
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

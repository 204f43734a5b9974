"""Faults of a benchmarked job: the schedule of a run, and how a worker does them to itself."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.events import EventLog
from benchmarks.jobplan import NUM_RANKS, Fault, JobPlan, Kind, Place

WINDOW_FILE = "window.json"


def plan_schedule(
    seed: int, seconds: float, *, mean_gap_s: float = 10.0, num_ranks: int = NUM_RANKS
) -> tuple[Fault, ...]:
    """Plan a run's faults from its seed alone.

    As many as fit on average, at times drawn evenly over the window (so the gaps are those of
    a Poisson process). One is a SIGSTOP, never of the last third, where the window might end
    before it costs anything; the rest half exceptions, half SIGKILLs, an odd one an exception.
    """
    number = round(seconds / mean_gap_s)
    if number < 1:
        return ()
    draw = random.Random(seed)
    num_kills = (number - 1) // 2
    kinds: list[Kind] = ["kill"] * num_kills
    kinds += ["exception"] * (number - 1 - num_kills)
    draw.shuffle(kinds)
    kinds.insert(draw.randrange(max(1, number * 2 // 3)), "stop")
    times = sorted(draw.uniform(0, seconds) for _ in kinds)
    return tuple(
        Fault(kind=kind, rank=draw.randrange(num_ranks), at_s=round(at_s, 3))
        for kind, at_s in zip(kinds, times, strict=True)
    )


def plan_steps(
    kind: Kind,
    number: int,
    *,
    first_step: int,
    spacing: int,
    place: Place = "backward",
    num_ranks: int = NUM_RANKS,
) -> tuple[Fault, ...]:
    """Plan `number` faults of one kind at fixed steps, on rank 1 first and then on the next."""
    return tuple(
        Fault(
            kind=kind,
            rank=(1 + index) % num_ranks,
            step=first_step + index * spacing,
            place=place,
        )
        for index in range(number)
    )


class InjectedFaultError(RuntimeError):
    """The exception of an exception fault."""


class FaultInjector:
    """Does planned faults to the process that asks it, each once per run.

    A marker file remembers over restarts what was done. A fault that is due by the clock while
    its rank is not in its training loop is dropped as "merged" with the outage it falls into,
    but SIGSTOP: that one waits for the rank. `strike` does a fault of a kind, with its words.
    """

    def __init__(
        self, plan: JobPlan, log: EventLog, strike: Callable[[Kind, str], None] | None = None
    ) -> None:
        self.plan = plan
        self.log = log
        self._strike = strike or strike_process
        self.began_s: float | None = None
        self.asked_s = time.monotonic()

    def fire(self, rank: int, step: int, place: Place = "backward") -> None:
        """Do the fault of `rank` that is due at `step` or by now, if there is one.

        To be called in every step between forward and backward, and within the update by
        systems that have faults there. An exception leaves this function, SIGKILL does not
        come back, SIGSTOP comes back after SIGCONT.
        """
        asked_s = self.asked_s
        if place == "backward":
            # A fault by the clock is due where all systems have faults.
            self.asked_s = time.monotonic()
        for index, fault in enumerate(self.plan.faults):
            if (fault.rank, fault.place) != (rank, place) or not self._is_due(fault, step):
                continue
            if not self._mark(index):
                continue
            if fault.at_s is not None and fault.kind != "stop":
                due_s = self._window_began_s() + fault.at_s
                if due_s < asked_s:
                    self.log.write("merged", rank, index=index, kind=fault.kind)
                    continue
            self.log.write("faulted", rank, step=step, index=index, kind=fault.kind)
            self._strike(fault.kind, f"planned fault {index} of rank {rank} in step {step}")

    def _is_due(self, fault: Fault, step: int) -> bool:
        if fault.at_s is None:
            return fault.step == step
        return self.asked_s >= self._window_began_s() + fault.at_s

    def _window_began_s(self) -> float:
        if self.began_s is None:
            try:
                text = Path(self.plan.run_dir, WINDOW_FILE).read_text("utf-8")
            except FileNotFoundError:
                return float("inf")
            self.began_s = float(json.loads(text)["began_s"])
        return self.began_s

    def _mark(self, index: int) -> bool:
        try:
            Path(self.plan.run_dir, f"fired-{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def strike_process(kind: Kind, words: str) -> None:
    """Do one fault to this process."""
    if kind == "exception":
        raise InjectedFaultError(words)
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def open_window(run_dir: str, began_s: float) -> None:
    """Tell all workers when the measured window began; written whole or not at all."""
    path = Path(run_dir, WINDOW_FILE)
    path.with_suffix(".new").write_text(json.dumps({"began_s": began_s}), "utf-8")
    path.with_suffix(".new").replace(path)

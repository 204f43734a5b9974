"""From what the overhead benchmarks noted to figures. Pure: lists in, numbers out."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.events import Event

STEP_BAR = 1.03
MEMORY_BAR = 1.05
RECOVERY_MEMORY_BAR = 1.15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratios of pairs: the median with its 95 % interval, and the mean."""

    median: float
    low: float
    high: float
    mean: float
    of_sums: float
    """The sum of all numerators over that of all denominators: what a long run would see."""
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f}-{self.high:.4f}), mean {self.mean:.4f}"


def judge_pairs(ours: Sequence[float], plain: Sequence[float]) -> Ratio:
    """Compare pairs. The interval is exact for a median whatever the values' distribution."""
    ratios = sorted(one / other for one, other in zip(ours, plain, strict=True))
    number = len(ratios)
    half = 0.98 * math.sqrt(number)
    low = max(0, math.floor(number / 2 - half))
    return Ratio(
        median=statistics.median(ratios),
        low=ratios[low],
        high=ratios[number - 1 - low],
        mean=statistics.fmean(ratios),
        of_sums=sum(ours) / sum(plain),
        num_pairs=number,
    )


def join_spans(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return how long each step took: from the first rank's begin to the last rank's end."""
    return [
        max(each[-1] for each in step) - min(each[0] for each in step)
        for step in zip(*ranks, strict=True)
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The proportional set sizes of a job's processes at one time, in bytes by pid."""

    at_s: float
    agent: Mapping[int, int]
    """torchrun's or ours, and the process that workers are forked from."""
    workers: Mapping[int, int]
    """Ranks and spares."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes by kind of process."""

    agent: int
    ranks: int
    spares: int

    @property
    def total(self) -> int:
        """Return what all have together."""
        return self.agent + self.ranks + self.spares


def name_ranks(sample: Sample, joined_s: Mapping[int, float]) -> Memory:
    """Tell ranks from spares: a rank has joined by the time of the sample."""
    ranks = sum(
        size
        for pid, size in sample.workers.items()
        if joined_s.get(pid, float("inf")) <= sample.at_s
    )
    return Memory(
        agent=sum(sample.agent.values()),
        ranks=ranks,
        spares=sum(sample.workers.values()) - ranks,
    )


def first_events(events: Iterable[Event]) -> dict[int, float]:
    """Return when each process was first heard of as a rank."""
    found: dict[int, float] = {}
    for event in events:
        found.setdefault(event.pid, event.at_s)
    return found


def between(samples: Iterable[Sample], begin_s: float, end_s: float) -> Iterator[Sample]:
    """Yield the samples of a while."""
    return (each for each in samples if begin_s <= each.at_s <= end_s)


def calm_window(events: Sequence[Event], first_step: int) -> tuple[float, float]:
    """Return from when all ranks have committed a step until the first fault, or the last commit.

    Raises ValueError where there is no such time.
    """
    commits = [event for event in events if event.word == "committed"]
    begins = [event.at_s for event in commits if event.step == first_step]
    faults = [event.at_s for event in events if event.word == "faulted"]
    if not begins:
        raise ValueError(f"no rank has committed step {first_step}")
    return max(begins), min(faults or [max(event.at_s for event in commits)])


def recovery_windows(events: Sequence[Event], num_ranks: int) -> list[tuple[str, float, float]]:
    """Return (kind, begin, end) of each fault: the end is when all ranks took two more steps."""
    windows = []
    for fault in (event for event in events if event.word == "faulted"):
        ends = sorted(
            event.at_s
            for event in events
            if event.word == "committed"
            and event.at_s > fault.at_s
            and event.step == fault.step + 1
        )
        if len(ends) >= num_ranks:
            windows.append((str(fault.values["kind"]), fault.at_s, ends[num_ranks - 1]))
    return windows

"""Where a run's time went: every second of every rank, in one of a few parts. Pure.

What a rank did is told by its own events; within a recovery all ranks wait for it, so there the
stage of the recovery counts. The rank that writes the step events says how long it waited for data
and stood still for checkpoints, and the others waited with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from launcher.job import Job
from launcher.monitor.phases import CHECKPOINT, RECOVERY, STARTING, TRAINING
from launcher.monitor.recoveries import Recovery
from launcher.monitor.standstill import standstill_limit_s, usual_step_s
from launcher.report.record import RunRecord, Size, Span, Step

START = "start"
DATA_WAIT = "data wait"
CHECKPOINT_STALL = "checkpoint stall"
DETECTION = "detection"
TEARDOWN = "teardown"
REPAIR = "repair"
LOST_WORK = "lost work"
SMALLER = "smaller"
STANDSTILL = "standstill"
STOP = "stop"
PARTS = (
    TRAINING, START, DATA_WAIT, CHECKPOINT_STALL, DETECTION, TEARDOWN, REPAIR, LOST_WORK,
    SMALLER, STANDSTILL, STOP,
)  # fmt: skip
_PART_OF_PHASE = {
    STARTING: START,
    "process group": START,
    "data": START,
    "model": START,
    TRAINING: TRAINING,
    CHECKPOINT: CHECKPOINT_STALL,
    RECOVERY: REPAIR,
}
"""All others are of ranks that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a run's time was spent on."""

    num_ranks: int
    wall_s: float
    seconds: Mapping[str, float]
    """Of all ranks together, for each of PARTS."""

    @property
    def total_s(self) -> float:
        """Return the seconds of all parts."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Return the share of training that was not lost; None where no rank did anything."""
        return self.seconds[TRAINING] / self.total_s if self.total_s > 0 else None


@dataclass(frozen=True, slots=True)
class _Window:
    """A time that counts as one part."""

    start_s: float
    end_s: float
    part: str


def account_of(record: RunRecord) -> Account:
    """Return where the time of a run went."""
    recovery = list(_recovery_windows(record))
    lost = [*_lost_windows(record.lines), *_still_windows(record)]
    by_rank: dict[int, dict[str, float]] = {}
    for span in record.spans:
        seconds = by_rank.setdefault(span.rank, dict.fromkeys(PARTS, 0.0))
        absent = _absent_windows(record.sizes, span.rank)
        for part, spent_s in _parts_of(span, [*absent, *recovery], lost):
            seconds[part] += spent_s
    for seconds in by_rank.values():
        for part, waited_s in _waits(record.lines).items():
            # No more than there is: what a rank waited in a step that was lost is lost work.
            moved_s = min(waited_s, seconds[TRAINING])
            seconds[TRAINING] -= moved_s
            seconds[part] += moved_s
    total = {part: sum(each[part] for each in by_rank.values()) for part in PARTS}
    # Of a rank that the start was to have it counts, also where that never came.
    total[SMALLER] = sum(
        window.end_s - window.start_s
        for start in record.starts
        for rank in range(start.num_workers)
        for window in _absent_windows(record.sizes, rank)
        if start.begin_s <= window.start_s < start.end_s
    )
    total[START] += sum(_unbegun_s(record))
    return Account(
        num_ranks=len(by_rank) or record.job.trainer.world_size, wall_s=record.wall_s, seconds=total
    )


def _unbegun_s(record: RunRecord) -> Iterator[float]:
    """Yield the seconds of all ranks of each start in which none came to begin."""
    for start in record.starts:
        if not any(start.begin_s <= each.start_s < start.end_s for each in record.spans):
            yield start.num_workers * (start.end_s - start.begin_s)


def _recovery_windows(record: RunRecord) -> Iterator[_Window]:
    """Yield the stages of each recovery; one that another fault cuts short ends with that."""
    starts = [each.fault_at - record.start for each in record.recoveries]
    nexts = [*starts[1:], math.inf]
    for recovery, start_s, next_s in zip(record.recoveries, starts, nexts, strict=False):
        ends_s = [each.end_s for each in record.starts if each.end_s >= start_s]
        limit_s = min([next_s, *ends_s])
        at_s = start_s
        for part, told_s in _stages(recovery, start_s, limit_s):
            end_s = min(max(told_s, at_s), max(limit_s, at_s))
            yield _Window(at_s, end_s, part)
            at_s = end_s


def _stages(recovery: Recovery, start_s: float, limit_s: float) -> Iterator[tuple[str, float]]:
    """Yield each stage of a recovery with its end; one that nobody told of has no length."""
    detected_s = recovery.detected_s or 0.0
    yield DETECTION, start_s + detected_s
    yield TEARDOWN, start_s + max(detected_s, recovery.stopped_s or 0.0)
    yield REPAIR, limit_s if recovery.resumed_s is None else start_s + recovery.resumed_s


def _absent_windows(sizes: Sequence[Size], rank: int) -> Iterator[_Window]:
    """Yield when a run that had become smaller was without the rank."""
    for size in sizes:
        if size.num_workers <= rank:
            yield _Window(size.start_s, size.end_s, SMALLER)


def _lost_windows(lines: Sequence[Sequence[Step]]) -> Iterator[_Window]:
    """Yield when steps were taken that were taken again later."""
    for before, after in pairwise(lines):
        kept = [step.time_s for step in before if step.step < after[0].step]
        first_s = before[0].time_s - (before[0].duration_s or 0.0)
        yield _Window(kept[-1] if kept else first_s, before[-1].time_s, LOST_WORK)


def _still_windows(record: RunRecord) -> Iterator[_Window]:
    """Yield when the run stood still without a fault that was noticed.

    Of the time between two reported steps, that is what is left without the waits that the rank
    has told of, checkpoints, and the usual time of the steps.
    """
    steps = [step for line in record.lines for step in line]
    saves = [span for span in record.spans if (span.phase, span.rank) == (CHECKPOINT, 0)]
    for start in record.starts:
        own = [step for step in steps if start.begin_s <= step.time_s <= start.end_s]
        step_s = usual_step_s(step.duration_s for step in own if step.duration_s is not None)
        for before, end_s, num_steps, waited_s in _gaps(own, start.end_s, record.job):
            saved_s = sum(
                max(0.0, min(each.end_s, end_s) - max(each.start_s, before.time_s))
                for each in saves
            )
            trained_s = end_s - before.time_s - waited_s - saved_s
            if step_s is not None and trained_s > standstill_limit_s(step_s, num_steps):
                yield _Window(end_s - trained_s + step_s * num_steps, end_s, STANDSTILL)


def _gaps(
    steps: Sequence[Step], end_s: float, job: Job
) -> Iterator[tuple[Step, float, int, float]]:
    """Yield the steps of a start: each with its next one's time, number from there, and waits."""
    for before, after in pairwise(steps):
        if before.generation == after.generation and before.step < after.step:
            waited_s = (after.data_wait_s or 0.0) + (after.blocked_s or 0.0)
            yield before, after.time_s, after.step - before.step, waited_s
    last = job.trainer.max_steps
    if steps and (last is None or steps[-1].step + 1 < last):
        yield steps[-1], end_s, job.trainer.steps_between_events, 0.0


def _parts_of(
    span: Span, shared: Sequence[_Window], lost: Sequence[_Window]
) -> Iterator[tuple[str, float]]:
    """Yield the parts of a span with their seconds, which add up to its own."""
    rests = [(span.start_s, span.end_s)]
    windows = [*shared, *(lost if span.phase == TRAINING else ())]
    for window in windows:
        rests, taken_s = _cut(rests, window)
        yield window.part, taken_s
    part = _PART_OF_PHASE.get(span.phase, STOP)
    yield part, sum(end_s - start_s for start_s, end_s in rests)


def _cut(
    rests: Sequence[tuple[float, float]], window: _Window
) -> tuple[list[tuple[float, float]], float]:
    """Take a window out of intervals; returns those that are left, and the seconds taken."""
    left: list[tuple[float, float]] = []
    taken_s = 0.0
    for start_s, end_s in rests:
        low, high = max(start_s, window.start_s), min(end_s, window.end_s)
        if low >= high:
            left.append((start_s, end_s))
            continue
        taken_s += high - low
        left += [each for each in ((start_s, low), (high, end_s)) if each[0] < each[1]]
    return left, taken_s


def _waits(lines: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Return how long the rank that writes the steps waited, for those that were not lost."""
    lasting = [
        step
        for place, line in enumerate(lines)
        for step in line
        if place + 1 == len(lines) or step.step < lines[place + 1][0].step
    ]
    return {
        DATA_WAIT: sum(step.data_wait_s or 0.0 for step in lasting),
        CHECKPOINT_STALL: sum(step.blocked_s or 0.0 for step in lasting),
    }


def account_text(account: Account) -> str | None:
    """Return the shares in one line, the largest first; None where no rank did anything."""
    total_s = account.total_s
    if total_s <= 0:
        return None
    shares = sorted(account.seconds.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{100 * seconds / total_s:.1f} % {part}"
        for part, seconds in shares
        if 100 * seconds / total_s >= _SHARE_SHOWN_MIN
    )


_SHARE_SHOWN_MIN = 0.05
"""Percent."""


def account_data(account: Account) -> dict[str, Any]:
    """Return the same as plain data that JSON can hold."""
    return {
        "num_ranks": account.num_ranks,
        "wall_s": account.wall_s,
        "goodput": account.goodput,
        "seconds": dict(account.seconds),
    }

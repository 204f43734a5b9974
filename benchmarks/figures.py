"""From the events of a run to figures. Pure: lists in, numbers out, no clock and no file."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from benchmarks.events import Event

WARM_STEPS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """What one fault cost.

    `recovery_s` is from the fault to the commit of the faulted step, or a later one, by as many
    ranks as there were, less one normal step; `survivors_s` the same for all ranks but one.
    None: not before the next fault or the end. A step is lost if it was committed before and
    had to be done again; a sample, if a step was committed without the rank that has it.
    """

    kind: str
    rank: int
    step: int
    recovery_s: float | None
    survivors_s: float | None
    steps_lost: int
    samples_lost: int
    ranks_lost: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """A step that counts: when its last rank committed it, and how many ranks it had."""

    step: int
    done_s: float
    world: int


def named(events: Iterable[Event], word: str) -> list[Event]:
    """Return the events of one word."""
    return [event for event in events if event.word == word]


def last_steps(events: Iterable[Event]) -> dict[int, int]:
    """Return each rank's last committed step."""
    return {event.rank: event.step for event in named(events, "committed")}


def normal_step_s(events: Sequence[Event]) -> float | None:
    """Return the median time of a step before the first fault, warm-up left out."""
    faults = named(events, "faulted")
    until_s = faults[0].at_s if faults else float("inf")
    gaps: list[float] = []
    commits = [event for event in named(events, "committed") if event.at_s < until_s]
    for pid in {event.pid for event in commits}:
        times = [event.at_s for event in commits if event.pid == pid][WARM_STEPS:]
        gaps += [late - early for early, late in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None


def judge_faults(
    events: Sequence[Event], *, num_ranks: int, micro_batch: int
) -> list[FaultFigures]:
    """Judge each fault by what happened until the next one; events are in order of time."""
    step_s = normal_step_s(events) or 0.0
    faults = named(events, "faulted")
    ends = [*(fault.at_s for fault in faults), float("inf")][1:]
    commits = named(events, "committed")
    judged = []
    for fault, until_s in zip(faults, ends, strict=True):
        before = [event for event in commits if event.at_s < fault.at_s]
        after = [event for event in commits if fault.at_s < event.at_s < until_s]
        expected = before[-1].world if before else num_ranks
        judged.append(
            judge_fault(
                fault, before, after, expected=expected, micro_batch=micro_batch, step_s=step_s
            )
        )
    return judged


def judge_fault(
    fault: Event,
    before: Sequence[Event],
    after: Sequence[Event],
    *,
    expected: int,
    micro_batch: int,
    step_s: float,
) -> FaultFigures:
    """Judge one fault by the commits before and after it; `expected` ranks were there."""
    caught_s: dict[int, float] = {}
    worlds: dict[int, int] = {}
    for event in after:
        worlds[event.step] = event.world
        if event.step >= fault.step:
            caught_s.setdefault(event.rank, event.at_s)
    times = sorted(caught_s.values())

    def until(number: int) -> float | None:
        return times[number - 1] - fault.at_s - step_s if 1 <= number <= len(times) else None

    done = {(event.rank, event.step) for event in before}
    again = done & {(event.rank, event.step) for event in after}
    return FaultFigures(
        kind=fault.values["kind"],
        rank=fault.rank,
        step=fault.step,
        recovery_s=until(expected),
        survivors_s=until(expected - 1),
        steps_lost=len({step for _, step in again}),
        samples_lost=sum(max(0, expected - world) for world in worlds.values()) * micro_batch,
        ranks_lost=max(0, expected - (after[-1].world if after else 0)),
    )


def digests(events: Iterable[Event]) -> frozenset[str]:
    """Return the digests of the final states; more than one means that ranks disagree."""
    return frozenset(event.values["digest"] for event in named(events, "finished"))


def is_equal(undisturbed: Sequence[Event], disturbed: Sequence[Event]) -> bool | None:
    """Return whether two runs ended in the same bits on all ranks; None if one did not end."""
    left, right = digests(undisturbed), digests(disturbed)
    if not left or not right:
        return None
    return len(left) == 1 and left == right


def keep_steps(events: Sequence[Event], began_s: float, until_s: float) -> list[KeptStep]:
    """Return the steps that a window added, in order of the time they were done for good.

    A step counts once all ranks of its world committed it, and no more once a rank restored an
    earlier state. What a job that is still restarting at the end will lose is not known, and
    so still counts.
    """
    commits: dict[int, dict[int, Event]] = {}
    old: set[int] | None = None
    for event in events:
        if event.at_s >= began_s and old is None:
            old = set(commits)
        if event.at_s >= until_s:
            break
        if event.word == "restored":
            commits = {step: who for step, who in commits.items() if step < event.step}
        elif event.word == "committed":
            commits.setdefault(event.step, {})[event.rank] = event
    kept = []
    for step, who in commits.items():
        world = max(event.world for event in who.values())
        if len(who) >= world and step not in (old or set()):
            done_s = max(event.at_s for event in who.values())
            kept.append(KeptStep(step=step, done_s=done_s, world=world))
    return sorted(kept, key=lambda one: one.done_s)


def two_worlds_s(events: Iterable[Event]) -> float:
    """Return for how long two processes committed steps as rank 0, each of a world of its own."""
    spans: dict[int, tuple[float, float]] = {}
    for event in named(events, "committed"):
        if event.rank == 0:
            began_s, _ = spans.get(event.pid, (event.at_s, event.at_s))
            spans[event.pid] = began_s, event.at_s
    both_s, until_s = 0.0, float("-inf")
    for began_s, end_s in sorted(spans.values()):
        both_s += max(0.0, min(until_s, end_s) - began_s)
        until_s = max(until_s, end_s)
    return both_s


def count_by_second(steps: Sequence[KeptStep], began_s: float, seconds: int) -> list[int]:
    """Count the kept steps of each second of a window."""
    counts = [0] * seconds
    for step in steps:
        second = int(step.done_s - began_s)
        if 0 <= second < seconds:
            counts[second] += 1
    return counts


def draw_time_line(counts: Sequence[int], normal_per_s: float) -> str:
    """Draw one character per second: # as fast as undisturbed, + slower, . no kept step."""
    return "".join(
        "." if count == 0 else "#" if count >= 0.75 * normal_per_s else "+" for count in counts
    )


def draw_marks(marks: Iterable[tuple[float, str]], seconds: int) -> str:
    """Draw letters at their seconds, the later over the earlier one."""
    line = [" "] * seconds
    for at_s, letter in marks:
        if 0 <= at_s < seconds:
            line[int(at_s)] = letter
    return "".join(line).rstrip()


def first_difference(undisturbed: Sequence[Event], disturbed: Sequence[Event]) -> int | None:
    """Return the first step in which rank 0 last had another loss than undisturbed, by bits."""
    left, right = (
        {event.step: event.values["loss"] for event in named(events, "committed") if not event.rank}
        for events in (undisturbed, disturbed)
    )
    return min(
        (step for step in left.keys() & right.keys() if left[step] != right[step]), default=None
    )


def spread(values: Sequence[float]) -> str:
    """Write a median with its extremes."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

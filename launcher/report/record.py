"""What a run's events amount to: its steps, and what each rank did when.

Pure. Times are seconds since the run's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from launcher.job import Job
from launcher.monitor.checkpoints import Checkpoint, list_checkpoints
from launcher.monitor.recoveries import Recovery, seconds_lost
from launcher.monitor.runstate import (
    CHECKPOINT,
    STARTING,
    TRAINING,
    RunState,
    next_state,
    phase_after,
    start_state,
    to_float,
)
from resilience.events import Event

IDLE = "idle"
_ENDS = {"worker_finished", "worker_failed", "worker_stopped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that was reported; a number that the event lacks is None."""

    generation: int
    step: int
    time_s: float
    loss: float | None
    duration_s: float | None
    num_samples: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one rank did from one moment to another."""

    rank: int
    node: str
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as its job and its events tell it."""

    job: Job
    state: RunState
    """At the end of the events."""
    start: float
    """Unix seconds."""
    wall_s: float
    lines: tuple[tuple[Step, ...], ...]
    """Steps that follow each other, each once; another line begins where the run went back."""
    recoveries: tuple[Recovery, ...]
    lost_s: float
    """Seconds from faults to the first steps after them."""
    spans: tuple[Span, ...]
    """By rank, then by time, without gaps."""
    failures: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    """What happened to those in the tiers, by time."""
    checkpoint_bytes: int | None

    @property
    def samples_per_second(self) -> float | None:
        """Return the rate between the first and the last step since the run last went back."""
        steps = [step for step in (self.lines or ((),))[-1] if step.num_samples is not None]
        if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
            return None
        num_samples = (steps[-1].num_samples or 0) - (steps[0].num_samples or 0)
        return num_samples / (steps[-1].time_s - steps[0].time_s)


def build_record(job: Job, events: Sequence[Event]) -> RunRecord:
    """Return the record of a run; one without any event is empty."""
    # Processes append in turn but take the time before that.
    ordered = sorted(events, key=lambda event: event.time)
    nodes = list(dict.fromkeys(event.node for event in ordered if event.rank is not None))
    state = reduce(next_state, ordered, start_state(job, nodes))
    start = state.started_at if state.started_at is not None else _time(ordered[:1])
    end = state.finished_at if state.finished_at is not None else _time(ordered[-1:])
    recoveries = state.recoveries
    return RunRecord(
        job=job,
        state=state,
        start=start,
        wall_s=end - start,
        lines=_lines(_steps(ordered, start)),
        recoveries=recoveries,
        lost_s=seconds_lost(recoveries, end),
        spans=_spans(ordered, start, end),
        failures=tuple(_failures(ordered)),
        checkpoints=list_checkpoints(ordered),
        checkpoint_bytes=_checkpoint_bytes(ordered),
    )


def _time(events: Sequence[Event]) -> float:
    return events[0].time if events else 0.0


def _failures(events: Iterable[Event]) -> Iterable[str]:
    for event in events:
        if event.event == "worker_failed":
            yield f"{event.node}, rank {event.rank}: {event.fields.get('message', '')}"
        elif event.event == "gave_up":
            yield f"{event.node} gave up: {event.fields.get('reason', '')}"


def _lines(steps: Iterable[Step]) -> tuple[tuple[Step, ...], ...]:
    """Cut steps in the order of their times where a run goes back to an earlier one.

    The last step before a fault may be reported again after it: the newest counts.
    """
    lines: list[list[Step]] = []
    for step in steps:
        last = lines[-1][-1] if lines else None
        if last is None or step.step < last.step:
            lines.append([step])
        elif step.step == last.step:
            seconds = last.duration_s if step.duration_s is None else step.duration_s
            lines[-1][-1] = replace(step, duration_s=seconds)
        else:
            lines[-1].append(step)
    return tuple(tuple(line) for line in lines)


def _steps(events: Iterable[Event], start: float) -> Iterable[Step]:
    for event in events:
        if event.event == "step" and event.step is not None:
            yield Step(
                generation=event.generation,
                step=event.step,
                time_s=event.time - start,
                loss=to_float(event.fields.get("loss")),
                duration_s=to_float(event.fields.get("duration_s")),
                num_samples=to_float(event.fields.get("num_samples")),
            )


def _checkpoint_bytes(events: Iterable[Event]) -> int | None:
    sizes = [
        event.fields.get("num_bytes") for event in events if event.event == "checkpoint_written"
    ]
    return sizes[-1] if sizes and isinstance(sizes[-1], int) else None


class _Timeline:
    """Turns a rank's events into spans."""

    def __init__(self, start: float) -> None:
        self._origin = start
        self._since: dict[int, tuple[str, float]] = {}
        self._nodes: dict[int, str] = {}
        self._spans: list[Span] = []

    def phase(self, rank: int) -> str | None:
        """Return what a rank does now, None before its first phase."""
        return self._since[rank][0] if rank in self._since else None

    def enter(self, rank: int, node: str, phase: str, time: float) -> None:
        """Begin a phase of a rank, and so end the one before."""
        if self.phase(rank) == phase and self._nodes[rank] == node:
            return
        self._end(rank, time)
        self._nodes[rank] = node
        self._since[rank] = (phase, time)

    def begin(self, rank: int, node: str, phase: str, time: float) -> None:
        """Begin the first phase of a new worker: until now it was being started."""
        before, since = self._since.get(rank, (IDLE, self._origin))
        if before == IDLE:
            self._since[rank] = (STARTING, since)
            self._nodes[rank] = node
        self.enter(rank, node, phase, time)

    def enter_all(self, before: str, phase: str, time: float) -> None:
        """Begin a phase of every rank that is in the phase `before`."""
        for rank, (now, _) in list(self._since.items()):
            if now == before:
                self.enter(rank, self._nodes[rank], phase, time)

    def lose(self, node: str, time: float) -> None:
        """End what the ranks of a lost node did."""
        for rank, place in list(self._nodes.items()):
            if place == node:
                self.enter(rank, node, IDLE, time)

    def end(self, time: float) -> tuple[Span, ...]:
        """Return all spans; what has not ended ends now."""
        for rank in self._since:
            self._end(rank, time)
        return tuple(sorted(self._spans, key=lambda span: (span.rank, span.start_s)))

    def _end(self, rank: int, time: float) -> None:
        if rank not in self._since:
            return
        phase, since = self._since[rank]
        if time > since:
            self._spans.append(
                Span(
                    rank=rank,
                    node=self._nodes[rank],
                    phase=phase,
                    start_s=since - self._origin,
                    end_s=time - self._origin,
                )
            )


def _spans(events: Iterable[Event], start: float, end: float) -> tuple[Span, ...]:
    timeline = _Timeline(start)
    for event in events:
        if event.event == "node_lost":
            timeline.lose(str(event.fields.get("node", event.node)), event.time)
        if event.rank is not None:
            _enter(timeline, event, event.rank)
    return timeline.end(end)


def _enter(timeline: _Timeline, event: Event, rank: int) -> None:
    phase = phase_after(event.event, timeline.phase(rank))
    if phase is None:
        return
    if event.event == "worker_started":
        timeline.begin(rank, event.node, phase, event.time)
    elif event.event == "checkpoint_started":
        # One rank reports it, and all take part or wait for it.
        timeline.enter_all(TRAINING, CHECKPOINT, event.time)
    elif event.event == "checkpoint_written":
        timeline.enter_all(CHECKPOINT, TRAINING, event.time)
    else:
        timeline.enter(rank, event.node, IDLE if event.event in _ENDS else phase, event.time)

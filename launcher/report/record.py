"""What a run's events amount to: its steps, and what each rank did when.

Pure. Times are seconds since the run's start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from launcher.job import Job
from launcher.job.workload import ScriptTrainer
from launcher.monitor.phases import CHECKPOINT, STARTING, TRAINING, phase_after
from launcher.monitor.programs import as_ours, steps_once
from launcher.monitor.recoveries import Recovery, seconds_lost
from launcher.monitor.runstate import RunState, next_own_state, start_state, to_float
from launcher.report.starts import Start, cut_starts
from resilience.events import Event

IDLE = "idle"
_UNITS = ("nodes", "devices")
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
    start: int = 0
    """The start of the run that took it, from 0."""
    lr: float | None = None
    grad_norm: float | None = None
    data_wait_s: float | None = None
    """Waited for data since the step before that was reported."""
    blocked_s: float | None = None
    """Stood still for checkpoints since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one rank did from one moment to another."""

    rank: int
    node: str
    phase: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many workers the run had for a while."""

    num_workers: int
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
    starts: tuple[Start, ...]
    """None where there is no event."""
    lines: tuple[tuple[Step, ...], ...]
    """Steps that follow each other, each once; another line begins where the run went back."""
    recoveries: tuple[Recovery, ...]
    """Of all starts."""
    lost_s: float
    """Seconds from faults to the first steps after them."""
    spans: tuple[Span, ...]
    """By rank, then by time, without gaps within a start."""
    sizes: tuple[Size, ...]
    """From the opening of each generation on."""
    failures: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        """Return how long the run was there, without the time between its starts."""
        return sum(each.end_s - each.begin_s for each in self.starts)

    @property
    def end(self) -> float:
        """Return when the last start ended, in unix seconds."""
        return self.start + (self.starts[-1].end_s if self.starts else 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the same rate in tokens."""
        rate, data = self.samples_per_second, self.job.data
        return None if rate is None or data is None else rate * data.seq_length

    @property
    def samples_per_second(self) -> float | None:
        """Return the rate of the last start, since the run last went back in it."""
        line = (self.lines or ((),))[-1]
        steps = [
            step for step in line if step.num_samples is not None and step.start == line[-1].start
        ]
        if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
            return None
        num_samples = (steps[-1].num_samples or 0) - (steps[0].num_samples or 0)
        return num_samples / (steps[-1].time_s - steps[0].time_s)


def build_record(job: Job, events: Sequence[Event]) -> RunRecord:
    """Return the record of a run from its events as their log is read; without any it is empty."""
    nodes = list(dict.fromkeys(event.node for event in events if event.rank is not None))
    if isinstance(job.trainer, ScriptTrainer):
        # Its workers write nothing of themselves.
        nodes = list({event.node for event in events if event.event == "agent_started"})
        workers = job.trainer.workers_per_node
        events = [each for event in steps_once(events) for each in as_ours(event, nodes, workers)]
    state = reduce(next_own_state, events, start_state(job, nodes))
    starts: list[Start] = []
    spans: list[Span] = []
    recoveries: list[Recovery] = []
    sizes: list[Size] = []
    lost_s = 0.0
    begin = min((event.time for event in events), default=0.0)
    for own in cut_starts(events) if events else ():
        times = [event.time for event in own]
        begin_s, last = min(times) - begin, max(times)
        start = Start(begin_s, last - begin, _wanted(own) or job.trainer.world_size)
        starts.append(start)
        spans += _spans(own, begin, start)
        sizes += _sizes(own, begin, start)
        found = reduce(next_own_state, own, start_state(job, nodes)).recoveries
        recoveries += [
            replace(each, number=number)
            for number, each in enumerate(found, start=len(recoveries) + 1)
        ]
        lost_s += seconds_lost(found, last)
    return RunRecord(
        job=job,
        state=state,
        start=begin,
        starts=tuple(starts),
        lines=_lines(_steps(events, begin)),
        recoveries=tuple(recoveries),
        lost_s=lost_s,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start_s))),
        sizes=tuple(sizes),
        failures=tuple(_failures(sorted(events, key=lambda event: event.time))),
    )


def _sizes(events: Iterable[Event], begin: float, start: Start) -> Iterator[Size]:
    """Yield which sizes a start of the run has had."""
    opened = [(event.time - begin, size) for event in events if (size := _size_of(event))]
    ends_s = [*(at_s for at_s, _ in opened[1:]), start.end_s]
    for (at_s, size), end_s in zip(opened, ends_s, strict=False):
        yield Size(num_workers=size, start_s=at_s, end_s=end_s)


def _wanted(events: Iterable[Event]) -> int | None:
    """Return how many workers a start was to have, where its launcher has said so."""
    for event in events:
        if event.event == "run_started":
            nodes, devices = (to_float(event.fields.get(f"num_{each}")) for each in _UNITS)
            return int(nodes * devices) if nodes and devices else None
    return None


def _size_of(event: Event) -> int | None:
    """Return how many workers the generation has that the event opens."""
    size = to_float(event.fields.get("world_size"))
    return int(size) if size and event.event == "generation_opened" else None


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
            known = {
                name: getattr(last, name)
                for name in ("duration_s", "data_wait_s", "blocked_s")
                if getattr(step, name) is None
            }
            lines[-1][-1] = replace(step, **known)
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
                start=int(to_float(event.fields.get("start")) or 0),
                lr=to_float(event.fields.get("lr")),
                grad_norm=to_float(event.fields.get("grad_norm")),
                data_wait_s=to_float(event.fields.get("data_wait_s")),
                blocked_s=to_float(event.fields.get("blocked_s")),
            )


class _Timeline:
    """Turns a rank's events into spans, each of which ends where the next one begins."""

    def __init__(self, begin_s: float) -> None:
        self._begin_s = begin_s
        self._num_at_first: int | None = None
        self._spans: dict[int, list[Span]] = {}

    def phase(self, rank: int) -> str | None:
        """Return what a rank does now, None before its first phase."""
        return self._spans[rank][-1].phase if rank in self._spans else None

    def enter(self, rank: int, node: str, phase: str, time_s: float) -> None:
        """Begin a phase of a rank, and so end the one before."""
        spans = self._spans.setdefault(rank, [])
        if not spans or (spans[-1].phase, spans[-1].node) != (phase, node):
            # Processes append in turn but take the time before that, and clocks of nodes differ.
            start_s = max(time_s, spans[-1].start_s) if spans else time_s
            new = Span(rank=rank, node=node, phase=phase, start_s=start_s, end_s=math.inf)
            spans.append(new)

    def begin(self, rank: int, node: str, phase: str, time_s: float) -> None:
        """Begin the first phase of a new worker: until now it was being started."""
        if rank not in self._spans:
            is_later = self._num_at_first is not None and rank >= self._num_at_first
            self.enter(rank, node, STARTING, time_s if is_later else self._begin_s)
        elif self.phase(rank) == IDLE:
            self._spans[rank][-1] = replace(self._spans[rank][-1], node=node, phase=STARTING)
        self.enter(rank, node, phase, time_s)

    def enter_all(self, before: str, phase: str, time_s: float) -> None:
        """Begin a phase of every rank that is in the phase `before`."""
        for rank, spans in self._spans.items():
            if spans[-1].phase == before:
                self.enter(rank, spans[-1].node, phase, time_s)

    def lose(self, node: str, time_s: float) -> None:
        """End what the ranks of a lost node did."""
        for rank, spans in self._spans.items():
            if spans[-1].node == node:
                self.enter(rank, node, IDLE, time_s)

    def resize(self, num_workers: int, time_s: float) -> None:
        """End what ranks did that the run has no more."""
        if self._num_at_first is None:
            self._num_at_first = num_workers
        for rank, spans in self._spans.items():
            if rank >= num_workers:
                self.enter(rank, spans[-1].node, IDLE, time_s)

    def end(self, time_s: float) -> Iterator[Span]:
        """Yield all spans, by rank and then by time; what has not ended ends now."""
        for _, spans in sorted(self._spans.items()):
            ends_s = [*(span.start_s for span in spans[1:]), time_s]
            for span, end_s in zip(spans, ends_s, strict=True):
                if end_s > span.start_s:
                    yield replace(span, end_s=end_s)


def _spans(events: Iterable[Event], begin: float, start: Start) -> Iterator[Span]:
    """Yield what each rank did in a start of a run that began at that time."""
    timeline = _Timeline(start.begin_s)
    for event in events:
        if event.event == "node_lost":
            timeline.lose(str(event.fields.get("node", event.node)), event.time - begin)
        if size := _size_of(event):
            timeline.resize(size, event.time - begin)
        if event.rank is not None:
            _enter(timeline, event, event.rank, event.time - begin)
    yield from timeline.end(start.end_s)


def _enter(timeline: _Timeline, event: Event, rank: int, time_s: float) -> None:
    phase = phase_after(event.event, timeline.phase(rank))
    if phase is None:
        return
    if event.event == "worker_started":
        timeline.begin(rank, event.node, phase, time_s)
    elif event.event == "checkpoint_started":
        # One rank reports it, and all take part or wait for it.
        timeline.enter_all(TRAINING, CHECKPOINT, time_s)
    elif event.event == "checkpoint_written":
        timeline.enter_all(CHECKPOINT, TRAINING, time_s)
    else:
        timeline.enter(rank, event.node, IDLE if event.event in _ENDS else phase, time_s)

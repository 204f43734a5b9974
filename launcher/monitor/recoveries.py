"""What a run's faults cost: its generations as events tell them, and the recoveries between.

Pure. Events come from many processes and may be read in any order, so each
generation keeps the last time of every kind, and a recovery is worked out from
two neighbours: the generation that ended and the one after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

from launcher.monitor.checkpoints import source_text
from resilience.events import Event

# Peers that lose a connection say so before the agent says who died.
_CONSEQUENCE = "group"
_time = attrgetter("time")
_ROOTS = ("died", "hung", "node lost", "corrupt", "health", "other shard")
_ROOT_DELAY_S = 1.0
_PROGRESS = {"step", "process_group_ready", "data_ready", "model_ready", "rank_recovered",
             "rank_resumed", "checkpoint_started", "checkpoint_written", "checkpoint_loaded",
             "checkpoint_saved", "worker_started"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What is known of one generation; times are the last of their kind, in unix seconds."""

    opened_at: float | None = None
    """When the first agent said that it begins."""
    injected: tuple[Event, ...] = ()
    detected: tuple[Event, ...] = ()
    changes: tuple[Event, ...] = ()
    """Workers replaced, nodes lost and joined."""
    broken: Event | None = None
    fallback: Event | None = None
    surrender: Event | None = None
    stopped_at: float | None = None
    ready_at: float | None = None
    recovered_at: float | None = None
    resumed_at: float | None = None
    stepped_at: float | None = None
    """When the first step was reported."""
    seen_at: float | None = None
    """When one of its ranks was heard of last."""
    progress_at: float | None = None
    """When one of its ranks last took a step, or got on in another way."""
    recovered: Mapping[int, Event] = field(default_factory=dict)
    """How each rank came by its state, by rank."""
    has_ended: bool = False
    """Whether a rank of it has ended by itself, or as it was asked to."""
    num_steps: int = 0
    """Steps that were done when the newest was reported."""
    first_step: int | None = None
    """Number of the first step that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The way from a fault to the first step after it; None for what did not come about.

    `_s` are seconds since the fault, `_at` are unix seconds.
    """

    number: int
    """From 1."""
    generation: int
    """The one that the fault ended."""
    fault_at: float
    is_injected: bool
    reason: str
    """exception, died, hung, corrupt, group, node lost, all nodes lost, or what the coordinator
    said."""
    text: str
    rank: int | None
    place: str | None
    """Where the fault was injected."""
    step: int | None
    """Steps done before the fault."""
    detected_s: float | None
    stopped_s: float | None
    rebuilt_s: float | None
    recovered_s: float | None
    resumed_s: float | None
    roles: str
    """How the ranks came by their state, in words."""
    num_bytes: int
    """State that was moved."""
    changes: str
    """Workers replaced, nodes lost and joined, in words."""
    steps_lost: int
    fallback: str | None
    """Why and to what the run went back, where no replica could help."""
    surrender: str | None
    """Why the run gave up."""

    @property
    def is_done(self) -> bool:
        """Return whether a step was done after the fault."""
        return self.resumed_s is not None

    @property
    def fault(self) -> str:
        """Return what happened to which rank or node, and not whether it was injected."""
        return self._told("")

    @property
    def what(self) -> str:
        """Return the fault in a few words."""
        return self._told("injected " if self.is_injected else "")

    def _told(self, injected: str) -> str:
        who = "" if self.rank is None else f"rank {self.rank}: "
        where = "" if self.place is None else f" in {self.place}"
        return f"{who}{injected}{self.reason}{where}"


Generations = Mapping[int, Generation]


def next_generations(generations: Generations, event: Event) -> Generations:
    """Return what is known after an event; one that means nothing here changes nothing."""
    now = generations.get(event.generation, Generation())
    then = _after(now, event)
    if event.rank is not None:
        then = replace(then, seen_at=_later(then.seen_at, event))
        if event.event in _PROGRESS:
            then = replace(then, progress_at=_later(then.progress_at, event))
    return generations if then is now else {**generations, event.generation: then}


def _after(now: Generation, event: Event) -> Generation:
    match event.event:
        case "generation_opened":
            first = event.time if now.opened_at is None else min(now.opened_at, event.time)
            return replace(now, opened_at=first)
        case "rank_stopped":
            return replace(now, stopped_at=_later(now.stopped_at, event))
        case "process_group_ready":
            return replace(now, ready_at=_later(now.ready_at, event))
        case "rank_recovered" if event.rank is not None:
            recovered = {**now.recovered, event.rank: event}
            last = _later(now.recovered_at, event)
            return replace(now, recovered_at=last, recovered=recovered)
        case "rank_resumed":
            return replace(now, resumed_at=_later(now.resumed_at, event))
        case "step" if event.step is not None:
            first = event.time if now.stepped_at is None else min(now.stepped_at, event.time)
            begun = event.step if now.first_step is None else min(now.first_step, event.step)
            done = max(now.num_steps, event.step + 1)
            return replace(now, stepped_at=first, num_steps=done, first_step=begun)
        case "worker_finished" | "worker_stopped":
            return replace(now, has_ended=True)
        case _:
            return _after_fault(now, event)


def _after_fault(now: Generation, event: Event) -> Generation:
    match event.event:
        case "fault_injected":
            return replace(now, injected=(*now.injected, event))
        case "fault_detected":
            return replace(now, detected=(*now.detected, event))
        case "coordinator_replaced":
            lost = replace(event, event="node_lost", fields={"node": _text(event, "lost")})
            text = f"{_text(event, 'lost')}, which coordinated the run, is gone or silent"
            fault = replace(event, fields={"reason": "node lost", "text": text})
            return replace(now, detected=(*now.detected, fault), changes=(*now.changes, lost))
        case "worker_replaced" | "node_lost" | "node_joined":
            return replace(now, changes=(*now.changes, event))
        case "generation_broken":
            return replace(now, broken=now.broken or event)
        case "recovery_fallback":
            return replace(now, fallback=event)
        case "gave_up":
            return replace(now, surrender=now.surrender or event)
        case _:
            return now


def _later(last: float | None, event: Event) -> float:
    return event.time if last is None else max(last, event.time)


def list_recoveries(
    generations: Generations, standstill_limit_s: float | None = None
) -> tuple[Recovery, ...]:
    """Return a recovery for each generation that a fault ended, in their order.

    An event may lack how long the run had stood still when its fault was noticed. The last
    progress then tells it, if that was longer ago than the limit.
    """
    numbers = sorted(generations)
    pairs = [*pairwise(numbers), *((number, None) for number in numbers[-1:])]
    found: list[Recovery] = []
    for number, following in pairs:
        ended = generations[number]
        if following is not None:
            ended = _until(ended, generations[following].opened_at)
        after = Generation() if following is None else generations[following]
        is_told = bool(ended.broken or ended.detected or ended.surrender)
        loss = None if is_told else _loss(number, ended, after)
        if is_told or loss:
            ended = replace(ended, detected=(*ended.detected, *([loss] if loss else [])))
            steps = _num_steps(generations, number)
            limit_s = math.inf if standstill_limit_s is None else standstill_limit_s
            recovery = _recovery(len(found) + 1, number, ended, after, steps, limit_s)
            found.append(replace(recovery, detected_s=None) if loss else recovery)
    return tuple(found)


def _loss(number: int, ended: Generation, after: Generation) -> Event | None:
    """Return the fault that nobody was left to tell of; None for a generation that ended well.

    Newcomers found a run without state, in a generation behind one that has ended in no other way.
    """
    if after.fallback is None or ended.opened_at is None or ended.has_ended:
        return None
    last = max(ended.opened_at, ended.seen_at or ended.opened_at)
    time = last if after.opened_at is None else min(last, after.opened_at)
    fields = {"reason": "all nodes lost", "text": "none of them was left to tell of it"}
    return replace(
        after.fallback, time=time, rank=None, generation=number, step=None,
        event="fault_detected", fields=fields,
    )  # fmt: skip


def _until(ended: Generation, next_at: float | None) -> Generation:
    """Leave out what agents say of a generation that were silent, and know of none after it."""
    if next_at is None:
        return ended
    detected = tuple(each for each in ended.detected if each.time <= next_at)
    if not detected:
        # Clocks of nodes differ.
        return ended
    changes = tuple(each for each in ended.changes if each.time <= next_at)
    return replace(ended, detected=detected, changes=changes)


def _num_steps(generations: Generations, number: int) -> int:
    """Return the steps that were done at the end of a generation, since the last fallback."""
    steps = 0
    for each in sorted(generations):
        if each > number:
            break
        if generations[each].fallback:
            steps = 0
        steps = max(steps, generations[each].num_steps)
    return steps


def seconds_lost(recoveries: Sequence[Recovery], end: float) -> float:
    """Return the seconds from each fault to the first step after it, added up.

    A recovery that another fault cut short ends with that one, the last of a
    run that gave up with the run, at `end`.
    """
    limits = [*(each.fault_at for each in recoveries[1:]), end]
    return sum(
        max(0.0, each.resumed_s if each.resumed_s is not None else limit - each.fault_at)
        for each, limit in zip(recoveries, limits, strict=False)
    )


def _began(ended: Generation, cause: Event, noticed_at: float, limit_s: float) -> float:
    """Return when a real fault began: at the last progress before it."""
    quiet_s = cause.fields.get("quiet_s")
    began = cause.time - quiet_s if isinstance(quiet_s, (int, float)) else cause.time
    last = noticed_at if ended.progress_at is None else ended.progress_at
    if not quiet_s and noticed_at - last > limit_s:
        began = last
    # What a rank did before its generation was opened is of the one before.
    return min(noticed_at, began if ended.opened_at is None else max(began, ended.opened_at))


def _recovery(
    number: int,
    generation: int,
    ended: Generation,
    after: Generation,
    num_steps: int,
    limit_s: float,
) -> Recovery:
    first = min(ended.detected, key=_time, default=None)
    noticed = first or ended.broken or ended.surrender
    assert noticed is not None
    cause = _cause(ended.detected, noticed)
    injected = _injected(ended, cause, noticed.time)
    start = _began(ended, cause, noticed.time, limit_s) if injected is None else injected.time
    told = injected or cause

    def since(time: float | None) -> float | None:
        return None if time is None or time < start else time - start

    return Recovery(
        number=number,
        generation=generation,
        fault_at=start,
        is_injected=injected is not None,
        reason=_text(injected, "fault_kind") if injected else _reason(cause),
        text=_text(cause, "text"),
        rank=told.rank,
        place=_text(injected, "place").replace("_", " ") or None,
        step=num_steps if told.step is None else told.step,
        detected_s=since(noticed.time),
        stopped_s=since(ended.stopped_at),
        rebuilt_s=since(after.ready_at),
        recovered_s=since(after.recovered_at),
        # Workers that began afresh have recovered nothing, and say no more than their steps.
        resumed_s=since(after.resumed_at if after.recovered else after.stepped_at),
        roles=_roles(after.recovered),
        num_bytes=_bytes_taken(after.recovered.values()),
        changes=_changes(ended, after, start),
        steps_lost=_steps_lost(ended, after, num_steps),
        fallback=_fallback(after.fallback),
        surrender=_text(ended.surrender, "reason") if ended.surrender else None,
    )


def _cause(detected: Sequence[Event], noticed: Event) -> Event:
    """Return what ended a generation among what its ranks complained of at about the same time."""
    ordered = sorted(detected, key=_time)
    roots = [
        each
        for each in ordered
        if _reason(each) in _ROOTS and each.time <= noticed.time + _ROOT_DELAY_S
    ]
    others = [each for each in ordered if _reason(each) != _CONSEQUENCE]
    return (roots or others or [noticed])[0]


def _injected(ended: Generation, cause: Event, noticed_at: float) -> Event | None:
    """Return the injected fault that ended a generation: its rank's newest, else the newest."""
    before = [each for each in ended.injected if each.time <= max(noticed_at, cause.time)]
    # What only slows a rank ends nothing, unless the agent takes that rank for hung.
    if _reason(cause) != "hung":
        before = [each for each in before if _text(each, "fault_kind") != "slow"]
    of_rank = [each for each in before if each.rank == cause.rank]
    return max(of_rank or before, key=_time, default=None)


def _steps_lost(ended: Generation, after: Generation, num_steps: int) -> int:
    """Return the steps that were done and have to be done again.

    None without a fallback, where ranks have recovered; others begin afresh, or where their own
    checkpoints are.
    """
    if not after.fallback:
        begins = num_steps if after.recovered or after.first_step is None else after.first_step
        return max(0, num_steps - begins)
    begun = [each.step for each in (*after.recovered.values(), after.fallback)]
    return max(0, num_steps - min((step for step in begun if step is not None), default=num_steps))


def _roles(recovered: Mapping[int, Event]) -> str:
    counts = Counter(_text(event, "role") or "kept" for event in recovered.values())
    parts = []
    for role in sorted(counts, key=lambda role: (-counts[role], role)):
        words = f"{counts[role]} {role.replace('_', ' ')}"
        parts.append(words + _sources(recovered.values(), role))
    return ", ".join(parts)


def _bytes_taken(events: Iterable[Event]) -> int:
    """Return how much state was moved; who gives it, and keeps its own, counts the same bytes."""
    return sum(_whole(each, "num_bytes") for each in events if _text(each, "role") != "kept")


def _sources(events: Iterable[Event], role: str) -> str:
    """Return from whom the ranks of a role have their state."""
    sources: list[Any] = []
    for event in events:
        given = event.fields.get("source") if _text(event, "role") == role else None
        sources += given if isinstance(given, (list, tuple)) else [given]
    ranks = sorted({each for each in sources if isinstance(each, int)})
    names = sorted({str(each) for each in sources if isinstance(each, str) and each})
    if ranks:
        names = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}", *names]
    return f" from {' and '.join(names)}" if names else ""


def _changes(ended: Generation, after: Generation, start: float) -> str:
    """Return what became of workers and nodes between a fault and the first step after it."""
    end = float("inf") if after.resumed_at is None else after.resumed_at
    events = sorted((*ended.changes, *after.changes), key=_time)
    return ", ".join(dict.fromkeys(_change(each) for each in events if start <= each.time <= end))


def _change(event: Event) -> str:
    if event.event == "worker_replaced":
        return f"worker of rank {event.rank} replaced"
    node = _text(event, "node") or event.node
    return f"{node} {'lost' if event.event == 'node_lost' else 'joined'}"


def _fallback(event: Event | None) -> str | None:
    if event is None:
        return None
    source = _text(event, "source")
    if source == "start":
        where = "the start"
    elif not source:
        where = "the checkpoint"
    else:
        where = f"the checkpoint in {source_text(source.split('+'))}"
    return f"back to {where}: {_text(event, 'reason')}"


def _reason(event: Event) -> str:
    return _text(event, "reason") or "fault"


def _text(event: Event | None, name: str) -> str:
    value = None if event is None else event.fields.get(name)
    return "" if value is None else str(value)


def _whole(event: Event, name: str) -> int:
    value = event.fields.get(name)
    return value if isinstance(value, int) else 0

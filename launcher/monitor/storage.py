"""What is known of a run's store: how far it is, and whether it fails. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.monitor.duration import format_seconds
from resilience.events import Event

_STEPS_MAX = 16
"""A run goes back to one of these, if at all."""
_OF_STORE = {"s3", "folder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A store that a node cannot use."""

    since: float
    """Unix seconds."""
    text: str
    """The store's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The store as the nodes tell of it."""

    steps: tuple[tuple[int, float], ...] = ()
    """The last steps that were whole there, and when it was first told, in unix seconds."""
    failing: Mapping[str, Failing] = field(default_factory=dict)
    """By node."""

    @property
    def stored_step(self) -> int | None:
        """Return the newest step that is whole there, None where nobody has told of one."""
        return self.steps[-1][0] if self.steps else None

    @property
    def stored_at(self) -> float:
        """Return when it was first told, in unix seconds."""
        return self.steps[-1][1] if self.steps else 0.0


def next_storage(known: Storage, event: Event) -> Storage:
    """Return what is known after an event; one that means nothing here changes nothing."""
    if event.event == "store_failing":
        failing = Failing(since=event.time, text=str(event.fields.get("text", "")))
        return replace(known, failing={**known.failing, event.node: failing})
    if event.event == "store_well":
        left = {node: each for node, each in known.failing.items() if node != event.node}
        return replace(known, failing=left)
    if event.event == "checkpoint_loaded" and event.step is not None:
        return _go_back(known, event, event.step)
    if event.event != "step_stored" or event.step is None:
        return known
    if known.stored_step is not None and event.step <= known.stored_step:
        return known
    return replace(known, steps=(*known.steps, (event.step, event.time))[-_STEPS_MAX:])


def lost_step(known: Storage, event: Event) -> str:
    """Return in words that a run goes on from an older step than its store had, else nothing."""
    newest = known.stored_step
    if event.event != "checkpoint_loaded" or newest is None or (event.step or 0) >= newest:
        return ""
    return f"the run goes on from step {event.step}, and step {newest} had been in the store"


def _go_back(known: Storage, event: Event, step: int) -> Storage:
    """Return what is known once a run goes on from a step: what was after it counts no more."""
    steps = tuple(each for each in known.steps if each[0] <= step)
    is_told = bool(steps) and steps[-1][0] == step
    if not is_told and _OF_STORE & set(str(event.fields.get("source", "")).split("+")):
        steps = (*steps, (step, event.time))
    return replace(known, steps=steps)


def storage_text(
    known: Storage, newest_step: int | None, now: float, before: str = "ago"
) -> str | None:
    """Return how far the store is, of `newest_step` that is saved anywhere; None: no word of it.

    `now` is in unix seconds, and `before` says what it is.
    """
    parts = []
    if known.stored_step is not None:
        # A daemon may tell of a step before the event of rank 0 is read.
        newest = max(known.stored_step, newest_step or 0)
        ago = format_seconds(max(0.0, now - known.stored_at))
        parts.append(f"in the store: step {known.stored_step} of {newest}, {ago} {before}")
    elif known.failing and newest_step is not None:
        parts.append(f"in the store: no step of {newest_step}")
    if known.failing:
        node, first = min(known.failing.items(), key=lambda each: each[1].since)
        others = f" and {len(known.failing) - 1} more" if len(known.failing) > 1 else ""
        since = format_seconds(max(0.0, now - first.since))
        parts.append(f"the store fails on {node}{others} for {since}: {first.text}")
    return "; ".join(parts) or None

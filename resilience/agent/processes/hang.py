"""Which of a node's workers do not get on. Pure.

Three things look alike from afar. A stopped process shows no heartbeat and is
in state T; a thread stuck in C shows heartbeats, or none where it holds the
interpreter's lock; a rank that waits for a stuck peer shows heartbeats and has
done nothing wrong. Only the first is known by looking. The others are told
apart by breaking the generation: who waits for a peer comes out of its
collective and reports, who is stuck does not, and is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilience.comm.page import Activity, Slot

STOPPED_STATES = ("T", "t")
"""Letters of /proc/PID/stat for a process that is stopped, by a signal or a debugger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A fault that nobody reported: no rank of the node gets on."""

    rank: int
    """The rank that is farthest behind; a stopped one where there is one."""
    text: str
    quiet_s: float
    """Seconds since the last progress of that rank."""
    stopped: tuple[int, ...]
    """Ranks whose process is stopped, to be replaced at once."""


def find_hang(
    slots: Mapping[int, Slot], states: Mapping[int, str], now_s: float, deadline_s: float
) -> Hang | None:
    """Return what is wrong if no rank has made progress for the deadline.

    `slots` and `states` (letters of /proc/PID/stat) are by rank. A rank that is
    NOWHERE is under no deadline, one that is WAITING holds nobody up, and as long
    as one of the others gets on nobody hangs. A process that is stopped is found
    wherever it is, once its heartbeat has been missing for the deadline.
    """
    stopped = tuple(sorted(rank for rank in slots if states.get(rank) in STOPPED_STATES))
    silent = tuple(rank for rank in stopped if is_silent(slots[rank], now_s, deadline_s))
    if silent:
        quiet_s = now_s - max(slots[rank].beat_s for rank in silent)
        return _describe(slots, silent[0], silent, f"no heartbeat for {quiet_s:.1f} s", now_s)
    activities = {slot.activity for slot in slots.values()}
    if Activity.NOWHERE in activities or not activities - {Activity.WAITING}:
        return None
    active = {rank: slot for rank, slot in slots.items() if slot.activity is not Activity.WAITING}
    quiet_s = now_s - max(slot.progress_s for slot in active.values())
    if quiet_s < deadline_s:
        return None
    rank = stopped[0] if stopped else min(active, key=lambda each: _progress(active[each], each))
    return _describe(slots, rank, stopped, f"no progress for {quiet_s:.1f} s", now_s)


def next_stopped(
    since: Mapping[int, float], states: Mapping[int, str], now_s: float
) -> dict[int, float]:
    """Return since when each process that is stopped has been, as far as it was seen.

    `since` is what was returned before; `states` are letters of /proc/PID/stat.
    """
    stopped = (each for each, state in states.items() if state in STOPPED_STATES)
    return {each: since.get(each, now_s) for each in stopped}


def is_silent(slot: Slot, now_s: float, deadline_s: float) -> bool:
    """Return whether a heartbeat that was there has been missing for the deadline."""
    return 0 < slot.beat_s <= now_s - deadline_s


def _describe(
    slots: Mapping[int, Slot], rank: int, stopped: tuple[int, ...], what: str, now_s: float
) -> Hang:
    slot = slots[rank]
    why = (
        "is stopped (state T)"
        if stopped
        else f"is farthest behind, silent for {max(0.0, now_s - slot.beat_s):.1f} s"
    )
    text = f"{what}; rank {rank} {why}, in {slot.activity.name.lower()} of step {slot.step}"
    # A rank that is under no deadline shows progress by its heartbeat alone.
    is_free = slot.activity in (Activity.NOWHERE, Activity.WAITING)
    quiet_s = max(0.0, now_s - (slot.beat_s if is_free else slot.progress_s))
    return Hang(rank=rank, text=text, quiet_s=quiet_s, stopped=stopped)


def _progress(slot: Slot, rank: int) -> tuple[int, int, int, int]:
    return slot.step, int(slot.activity), slot.micro_batch, rank

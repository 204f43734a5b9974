"""How a run stands, by what its cluster says of it and what its events say. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher.monitor.duration import format_seconds
from launcher.monitor.runstate import RunState

STOPPED_BY = "stopped by "
"""How the reason of a run on this machine begins that somebody has ended."""

_OWN_SIGNALS = (f"{STOPPED_BY}SIGINT", f"{STOPPED_BY}SIGHUP")
"""Signals of the terminal that the run was started in: Ctrl-C, and the terminal's end."""


class Phase(Enum):
    """Where a run is on its way."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FORGOTTEN = "forgotten"
    """The cluster knows nothing of it any more."""
    UNREACHABLE = "unreachable"
    """The cluster gives no answer."""

    @property
    def is_alive(self) -> bool:
        """Return whether the run waits or goes on."""
        return self in (Phase.QUEUED, Phase.RUNNING)

    @property
    def has_ended(self) -> bool:
        """Return whether the run is over, as far as anybody knows."""
        return not self.is_alive and self is not Phase.UNREACHABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a cluster says of a run."""

    phase: Phase
    why: str = ""
    """In the cluster's own words."""
    place: str = ""
    """The nodes, where the cluster names them."""
    cause: str = ""
    """The first cause of the run's end, where the cluster knows it."""
    words: str = ""
    """The last words of an agent, for a run without an error among its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Somebody has asked the launcher to end the run."""

    user: str
    time: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a run stands, and why."""

    phase: Phase
    why: str
    place: str = ""
    error: str = ""
    """The first failure."""


def decide_standing(
    said: JobStatus,
    seen: RunState,
    asked: CancelRequest | None,
    now: float,
    *,
    is_cut: bool = False,
) -> Standing:
    """Return how a run stands at `now`, in unix seconds.

    `said` is the cluster's word, `seen` what the events amount to, `asked` the last request to end
    this start of the run. A cluster that knows of the job is believed; where it has forgotten the
    job, or gives no answer, the events tell of an end, if there was one. With `is_cut` they may
    lack the last of them, and so a checkpoint that was saved at the end.
    """
    phase, why = said.phase, said.why
    if phase in (Phase.FORGOTTEN, Phase.UNREACHABLE) and (ended := _end_by_events(said, seen)):
        phase, why = ended
    error = said.cause or first_error(seen) or said.words
    told = "" if asked is None else _asked_text(asked, now)
    if phase is Phase.CANCELLED and not told and not why.startswith(_OWN_SIGNALS):
        told = "not by this launcher"
    elif told and phase in (Phase.CANCELLED, Phase.FORGOTTEN):
        phase = Phase.CANCELLED
    elif told and phase is Phase.RUNNING:
        told += ", and is ending"
    elif phase is Phase.FAILED:
        # A failure stays a failure, also where the end of the run was asked for meanwhile.
        why, told = "; ".join(filter(None, (why, error))), ""
    else:
        told = ""
    has_ended = phase in (Phase.CANCELLED, Phase.FAILED)
    unkept = seen.unkept if has_ended and not is_cut else ""
    parts = dict.fromkeys(filter(None, (told, why, "" if unkept in why else unkept)))
    return Standing(phase=phase, why="; ".join(parts), place=said.place, error=error)


def first_error(seen: RunState) -> str | None:
    """Return what failed first, as the events tell; None where they tell of nothing."""
    if seen.failure is not None:
        message = str(seen.failure.fields.get("message", "")).splitlines() or [""]
        return f"rank {seen.failure.rank} on {seen.failure.node}: {message[0]}"
    if seen.death is not None:
        event, worker = seen.death
        return f"{worker.node}: {event.fields.get('text', '')}"
    if seen.recoveries and (surrender := seen.recoveries[-1].surrender):
        return surrender
    return None if seen.has_opened else seen.meeting.surrender or next(iter(seen.losses), None)


def _end_by_events(said: JobStatus, seen: RunState) -> tuple[Phase, str] | None:
    if seen.exit_status == 0:
        return Phase.SUCCEEDED, seen.reason or ""
    if seen.exit_status is not None:
        reason = seen.reason or f"exit status {seen.exit_status}"
        is_stopped = reason.startswith(STOPPED_BY)
        return (Phase.CANCELLED if is_stopped else Phase.FAILED), reason
    if said.phase is Phase.FORGOTTEN and seen.phase == "finished":
        return Phase.SUCCEEDED, "by its events"
    return None


def _asked_text(asked: CancelRequest, now: float) -> str:
    ago = format_seconds(max(0.0, now - asked.time))
    return f"{asked.user} asked for its end with `launcher cancel`, {ago} ago"

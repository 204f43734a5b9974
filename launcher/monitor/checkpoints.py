"""What a run's tiers did: which checkpoints were taken, failed or were loaded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.monitor.duration import format_seconds
from resilience.events import Event

SAVED = "saved"
FAILED = "failed"
LOADED = "loaded"
UNREADABLE = "unreadable"

_MISSED_MIN = 2
"""So many checkpoints in a row that fail are worth a word; one may be a moment's trouble."""
_PEERS_MAX = 4
"""More names than this tell a person no more."""
_PLACES = {"s3": "S3", "folder": "the folder", "branch": "the run that it branched from"}
_KINDS = {f"checkpoint_{kind}": kind for kind in (SAVED, FAILED, LOADED, UNREADABLE)}
_KINDS["state_saved"] = SAVED
"""By nodes without a generation; their agent knows the place, and neither bytes nor seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Something that happened to the checkpoint of one step; ranks that say the same are one."""

    kind: str
    step: int
    generation: int
    time: float
    """Unix seconds; of the last rank."""
    seconds: float
    """What it took; of the slowest rank."""
    num_bytes: int
    """Of all ranks that told: rank 0 alone tells of a save."""
    num_bad: int
    """Copies that were not what their checksums say."""
    sources: tuple[str, ...]
    """Where a load came from: ram, peer:NODE, s3 or folder."""
    reason: str
    """The first rank's error; or the place of a state that nodes without a generation saved."""

    @property
    def what(self) -> str:
        """Return what happened in a few words."""
        if self.kind == FAILED:
            return f"checkpoint of step {self.step} failed: {self.reason}"
        if self.kind == UNREADABLE:
            return f"step {self.step} cannot be loaded: {self.reason}"
        if self.kind == SAVED and self.reason:
            return f"state of step {self.step} saved to {self.reason}"
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        took = f"{size} in {self.seconds:.3g} s"
        if self.kind == SAVED:
            return f"checkpoint of step {self.step}: {took} on rank 0"
        bad = f", bad copies left out: {self.num_bad}" if self.num_bad else ""
        return f"step {self.step} loaded from {source_text(self.sources)}: {took}{bad}"


def next_checkpoints(known: tuple[Checkpoint, ...], event: Event) -> tuple[Checkpoint, ...]:
    """Return what is known after an event; one that means nothing here changes nothing."""
    new = _read(event)
    if new is None:
        return known
    for place in reversed(range(len(known))):
        if known[place].kind == new.kind:
            joined = _join(known[place], new)
            return (*known[:place], joined, *known[place + 1 :]) if joined else (*known, new)
    return (*known, new)


def newest_saved(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the one that was saved last, without those that the run went back behind."""
    saved = _saved(checkpoints)
    for each in reversed(checkpoints):
        if each.kind == LOADED:
            saved = [one for one in saved if one.time > each.time or one.step <= each.step]
    return next(reversed(saved), None)


def missed_text(checkpoints: Sequence[Checkpoint], now: float) -> str | None:
    """Return that no checkpoint is made, and how old the newest is; None before the second miss."""
    newest = newest_saved(checkpoints)
    since_s = max(
        [
            newest.time if newest else 0.0,
            *(each.time for each in checkpoints if each.kind == LOADED),
        ]
    )
    missed = [each for each in checkpoints if each.kind == FAILED and each.time > since_s]
    if (count := len({each.step for each in missed})) < _MISSED_MIN:
        return None
    age = format_seconds(max(0.0, now - newest.time)) if newest else ""
    since = f"since that of step {newest.step}, {age} ago" if newest else "yet"
    return f"no checkpoint {since}: {count} failed, the last: {missed[-1].reason}"


def _saved(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return those that rank 0 has saved, and no rank has not."""
    failed = {(each.step, each.generation) for each in checkpoints if each.kind == FAILED}
    saved = (each for each in checkpoints if each.kind == SAVED)
    return [each for each in saved if (each.step, each.generation) not in failed]


def checkpoints_text(checkpoints: Sequence[Checkpoint]) -> str | None:
    """Return the number of checkpoints and the newest; None where there was none."""
    if not checkpoints:
        return None
    count = len(_saved(checkpoints))
    parts = ["1 checkpoint" if count == 1 else f"{count} checkpoints"]
    if newest := newest_saved(checkpoints):
        size = newest.reason or f"{newest.num_bytes / 1e6:,.1f} MB on rank 0"
        parts.append(f"newest of step {newest.step} ({size})")
    # Steps without a checkpoint, however many ranks said so.
    if failed := {each.step for each in checkpoints if each.kind == FAILED}:
        parts.append(f"{len(failed)} failed")
    if missed := missed_text(checkpoints, checkpoints[-1].time):
        parts.append(missed)
    if unread := {each.step for each in checkpoints if each.kind == UNREADABLE}:
        parts.append(f"step {', '.join(map(str, sorted(unread)))} could not be loaded")
    if loads := [each for each in checkpoints if each.kind == LOADED]:
        many = f"{len(loads)} loaded, last" if len(loads) > 1 else "loaded"
        parts.append(f"{many} step {loads[-1].step} from {source_text(loads[-1].sources)}")
    return ", ".join(parts)


def source_text(sources: Sequence[str]) -> str:
    """Return in words where a checkpoint lay, from near to far."""
    peers = [each.removeprefix("peer:") for each in sources if each.startswith("peer:")]
    places = ["own memory"] if "ram" in sources else []
    if len(peers) > _PEERS_MAX:
        places.append(f"memory of {len(peers)} other nodes")
    elif peers:
        places.append(f"memory of {', '.join(sorted(peers))}")
    others = (each for each in sources if each != "ram" and not each.startswith("peer:"))
    places += [_PLACES.get(each, each) for each in sorted(others)]
    return " and ".join(places) or "a checkpoint"


def _join(last: Checkpoint, new: Checkpoint) -> Checkpoint | None:
    """Return what two ranks tell of the same; None where it is not the same."""
    if new.kind == SAVED or _what_of(last) != _what_of(new):
        return None
    return replace(
        last,
        time=max(last.time, new.time),
        seconds=max(last.seconds, new.seconds),
        num_bytes=last.num_bytes + new.num_bytes,
        num_bad=last.num_bad + new.num_bad,
        sources=tuple(dict.fromkeys((*last.sources, *new.sources))),
    )


def _what_of(each: Checkpoint) -> tuple[str, int, int]:
    return each.kind, each.step, each.generation


def _read(event: Event) -> Checkpoint | None:
    kind, fields = _KINDS.get(event.event), event.fields
    step = fields.get("saved_step", event.step)
    if kind is None or step is None:
        return None
    source = fields.get("source")
    return Checkpoint(
        kind=kind,
        step=int(step),
        generation=event.generation,
        time=event.time,
        seconds=_number(fields.get("seconds")),
        num_bytes=int(_number(fields.get("num_bytes"))),
        num_bad=int(_number(fields.get("num_bad"))),
        sources=tuple(source.split("+")) if isinstance(source, str) and source else (),
        reason=str(fields.get("reason", fields.get("place", ""))),
    )


def _number(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and value == value else 0.0  # type: ignore[arg-type]

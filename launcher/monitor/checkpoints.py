"""What a run's tiers did: which checkpoints were taken, failed or were loaded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from resilience.events import Event

SAVED = "saved"
FAILED = "failed"
LOADED = "loaded"

_PEERS_MAX = 4
"""More names than this tell a person no more."""
_PLACES = {"s3": "S3", "folder": "the folder"}
_KINDS = {
    "checkpoint_saved": SAVED,
    "checkpoint_failed": FAILED,
    "checkpoint_loaded": LOADED,
}


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
    """Why it failed; of the first rank."""

    @property
    def what(self) -> str:
        """Return what happened in a few words."""
        if self.kind == FAILED:
            return f"checkpoint of step {self.step} failed: {self.reason}"
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        took = f"{size} in {self.seconds:.3g} s"
        if self.kind == SAVED:
            return f"checkpoint of step {self.step}: {took} on rank 0"
        bad = f", bad copies left out: {self.num_bad}" if self.num_bad else ""
        return f"step {self.step} loaded from {source_text(self.sources)}: {took}{bad}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What is known of a run's checkpoints in tiers so far."""

    num_saved: int = 0
    num_failed: int = 0
    """Steps without a checkpoint, however many ranks said so."""
    newest: Checkpoint | None = None
    """The one saved last."""
    loads: tuple[Checkpoint, ...] = ()
    last_failed: int | None = None

    @property
    def text(self) -> str | None:
        """Return the number of checkpoints and the newest; None where there was none."""
        if not (self.num_saved or self.num_failed or self.loads):
            return None
        parts = [f"{self.num_saved} checkpoints"]
        if self.newest:
            size = f"{self.newest.num_bytes / 1e6:,.1f} MB on rank 0"
            parts.append(f"newest of step {self.newest.step} ({size})")
        if self.num_failed:
            parts.append(f"{self.num_failed} failed")
        if self.loads:
            last = self.loads[-1]
            many = f"{len(self.loads)} loaded, last" if len(self.loads) > 1 else "loaded"
            parts.append(f"{many} step {last.step} from {source_text(last.sources)}")
        return ", ".join(parts)


def next_tally(tally: Tally, event: Event) -> Tally:
    """Return what is known after an event; one that means nothing here changes nothing."""
    found = _read(event)
    if found is None:
        return tally
    if found.kind == SAVED:
        return replace(tally, num_saved=tally.num_saved + 1, newest=found)
    if found.kind == FAILED:
        is_new = tally.last_failed != found.step
        return replace(tally, num_failed=tally.num_failed + is_new, last_failed=found.step)
    joined = _join(tally.loads[-1], found) if tally.loads else None
    loads = (*tally.loads[:-1], joined) if joined else (*tally.loads, found)
    return replace(tally, loads=loads)


def list_checkpoints(events: Sequence[Event]) -> tuple[Checkpoint, ...]:
    """Return what happened to checkpoints, in the order of their times."""
    found: list[Checkpoint] = []
    for event in events:
        new = _read(event)
        if new is None:
            continue
        if joined := _join(found[-1], new) if found else None:
            found[-1] = joined
        else:
            found.append(new)
    return tuple(found)


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
    kind = _KINDS.get(event.event)
    if kind is None or event.step is None:
        return None
    fields = event.fields
    source = fields.get("source")
    return Checkpoint(
        kind=kind,
        step=event.step,
        generation=event.generation,
        time=event.time,
        seconds=_number(fields.get("seconds")),
        num_bytes=int(_number(fields.get("num_bytes"))),
        num_bad=int(_number(fields.get("num_bad"))),
        sources=tuple(source.split("+")) if isinstance(source, str) and source else (),
        reason=str(fields.get("reason", "")),
    )


def _number(value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and value == value else 0.0  # type: ignore[arg-type]

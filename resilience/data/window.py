"""What a producer does next: which batch it makes, which segments it lets go.

Pure: no clock, file or socket. A test replays any history of consumers.

Rules:
1. What a consumer waits for comes first, the earliest of it before the rest.
2. Else the batches ahead of the slowest connected consumer are completed, up to the prefetch
   length; of validation, which begins at 0 again and again, the first ones too.
3. A segment goes when no resume can need it: it lies before the slowest consumer, connected or
   not, less the lookback, and before the checkpoint that a resume would begin at. None goes by
   its age.
4. The budget is never passed. Where it is short, what only a resume would need goes first, the
   newest before the rest: a resume finds its first batches, and the others can be made meanwhile.
   For a batch that somebody waits for there goes next the lookback, then what will be needed
   last and can be made again; for a batch that is made ahead nothing else goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """How much a producer keeps."""

    prefetch_length: int
    """Batches ready ahead of the slowest consumer."""
    lookback_length: int
    """Batches kept behind it."""
    checkpoint_frequency: int | None
    """A checkpoint is taken every so many batches; None: nothing is known of checkpoints."""
    budget_bytes: int
    is_validation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A segment, as far as it matters here."""

    serial: int
    first: int
    end: int
    """Number after its last batch."""
    num_bytes: int
    """What its file takes, with what is still free in it."""
    free_bytes: int = 0
    """Room for further batches; none in a segment that is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A consumer's place."""

    position: int
    """Number of the batch that it holds or needs."""
    is_connected: bool = True
    """False for a consumer that has gone and is expected back."""
    is_waiting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """All that the next step depends on."""

    limits: WindowLimits
    spans: tuple[Span, ...] = ()
    readers: tuple[Reader, ...] = ()
    checkpoint: int | None = None
    """First batch after the newest complete checkpoint; None where no consumer has said."""
    end: int | None = None
    """Number after the stage's last batch, where it is known."""
    failed: frozenset[int] = frozenset()
    """Batches that the source raised an error for."""
    batch_bytes: int = 0
    """What the next batch takes in a segment, as far as that is known."""
    segment_bytes: int = 0
    """What a new segment for it takes."""
    room_bytes: int | None = None
    """What all segments may take where the file system has less room than the budget."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: first let go of segments, then make a batch."""

    produce: int | None
    """Number of the batch; None: wait until something changes."""
    evict: tuple[int, ...]
    """Serials of the segments to be deleted."""
    reason: str
    is_short: bool = False
    """Whether the budget costs a segment that a resume might need."""
    blocked: int | None = None
    """Number of a batch that is waited for and that there is no room for."""
    count: int = 1
    """So many batches from `produce` on would be planned alike, as long as nothing else happens."""


def plan(window: Window) -> Plan:
    """Decide what the producer does next."""
    if not window.readers:
        return Plan(None, (), "waits for a first consumer")
    floor = keep_from(window)
    gone = tuple(span.serial for span in window.spans if _is_over(span, floor, window.limits))
    kept = tuple(span for span in window.spans if span.serial not in gone)
    if surplus := _surplus(window, kept):
        text = _budget_text(window, "deletes what was stored")
        return Plan(None, (*gone, *surplus), text, is_short=True)
    wanted = _first_wanted(window, kept)
    if wanted is not None:
        return _plan_wanted(window, kept, gone, wanted)
    ahead = _first_ahead(window, kept)
    if ahead is None:
        return Plan(None, gone, "has made all that may be made ahead")
    if _missing_bytes(window, kept, ahead) > 0:
        return _plan_ahead_in_short(window, kept, gone, ahead)
    count = _count_alike(window, kept, ahead)
    return Plan(ahead, gone, f"makes batch {ahead} ahead", count=count)


def keep_from(window: Window) -> int:
    """Return the first batch that is still kept: no consumer comes back to one before it."""
    limits = window.limits
    slowest = min(reader.position for reader in window.readers)
    behind = slowest - limits.lookback_length
    if limits.is_validation:
        return behind
    if window.checkpoint is not None:
        return min(behind, window.checkpoint)
    if limits.checkpoint_frequency is not None:
        # The last one may not be complete yet; so a resume may begin at the one before it.
        last = slowest // limits.checkpoint_frequency
        return min(behind, (last - 1) * limits.checkpoint_frequency)
    return behind


def first_missing(spans: Iterable[Span], number: int) -> int:
    """Return the first batch from `number` on that no segment holds."""
    for span in sorted(spans, key=lambda each: each.first):
        if span.first <= number < span.end:
            number = span.end
    return number


def _is_over(span: Span, floor: int, limits: WindowLimits) -> bool:
    if limits.is_validation and span.first < limits.prefetch_length:
        return False
    return span.end <= floor


def _first_wanted(window: Window, kept: tuple[Span, ...]) -> int | None:
    """Return the earliest batch that a consumer waits for and that can be made."""
    numbers = sorted(
        reader.position for reader in window.readers if reader.is_waiting and reader.is_connected
    )
    for number in numbers:
        if first_missing(kept, number) == number and _can_be_made(window, number):
            return number
    return None


def _first_ahead(window: Window, kept: tuple[Span, ...]) -> int | None:
    """Return the next batch that no consumer waits for yet."""
    length = window.limits.prefetch_length
    slowest = min(reader.position for reader in _leading(window))
    number = first_missing(kept, slowest)
    if number <= slowest + length and _can_be_made(window, number):
        return number
    if window.limits.is_validation:
        number = first_missing(kept, 0)
        if number < length and _can_be_made(window, number):
            return number
    return None


def _count_alike(window: Window, kept: tuple[Span, ...], number: int) -> int:
    """Return how many batches from this one on fit into its segment and may be made ahead."""
    span = _open_span(window, kept, number)
    if span is None:
        return 1
    length = window.limits.prefetch_length
    slowest = min(reader.position for reader in _leading(window))
    stops = {
        number + span.free_bytes // window.batch_bytes,
        slowest + length + 1,
        *([length] if window.limits.is_validation else []),
        *([] if window.end is None else [window.end]),
        *window.failed,
        *(each.first for each in kept),
    }
    return min(each for each in stops if each > number) - number


def _leading(window: Window) -> list[Reader]:
    """Return the consumers that batches are made for: those that are there, if any is."""
    connected = [reader for reader in window.readers if reader.is_connected]
    return connected or list(window.readers)


def _can_be_made(window: Window, number: int) -> bool:
    return number not in window.failed and (window.end is None or number < window.end)


def _surplus(window: Window, kept: tuple[Span, ...]) -> list[int]:
    """Return what goes where an earlier producer had a larger budget and has used it."""
    excess = sum(span.num_bytes for span in kept) - _room_bytes(window)
    return _give_up(_by_need(window, kept), excess)[0] if excess > 0 else []


def _give_up(spans: Iterable[Span], num_bytes: int) -> tuple[list[int], int]:
    """Return which of the segments go for so many bytes, the first before the rest.

    Also returns what is missing then; 0 or less where they are enough.
    """
    serials: list[int] = []
    for span in spans:
        if num_bytes <= 0:
            break
        serials.append(span.serial)
        num_bytes -= span.num_bytes
    return serials, num_bytes


def _plan_ahead_in_short(
    window: Window, kept: tuple[Span, ...], gone: tuple[int, ...], number: int
) -> Plan:
    """Make a batch ahead in the place of what only a resume would need, if that is enough."""
    missing = _missing_bytes(window, kept, number)
    serials, missing = _give_up(_of_resumes(window, kept), missing)
    if missing > 0:
        return Plan(None, gone, _budget_text(window, "makes nothing ahead"))
    text = _budget_text(window, f"makes batch {number} ahead")
    return Plan(number, (*gone, *serials), text, is_short=True)


def _plan_wanted(
    window: Window, kept: tuple[Span, ...], gone: tuple[int, ...], number: int
) -> Plan:
    missing = _missing_bytes(window, kept, number)
    if missing <= 0:
        return Plan(number, gone, f"makes batch {number}, which is waited for")
    serials, missing = _give_up(_by_need(window, kept), missing)
    if missing > 0:
        text = _budget_text(window, f"has no room for batch {number}")
        return Plan(None, gone, text, blocked=number)
    text = _budget_text(window, f"makes batch {number}")
    return Plan(number, (*gone, *serials), text, is_short=True)


def _by_need(window: Window, kept: tuple[Span, ...]) -> list[Span]:
    """Return the segments that can be done without, what is needed least first."""
    positions = [reader.position for reader in _leading(window)]
    slowest = min(positions)
    of_resumes = _of_resumes(window, kept)
    recent = [span for span in kept if span.end <= slowest and span not in of_resumes]
    ahead = [
        span
        for span in kept
        if span.end > slowest and not any(span.first <= each < span.end for each in positions)
    ]
    return [
        *of_resumes,
        *sorted(recent, key=lambda span: span.first),
        *sorted(ahead, key=lambda span: _distance(span, positions), reverse=True),
    ]


def _of_resumes(window: Window, kept: tuple[Span, ...]) -> list[Span]:
    """Return the segments that no consumer needs to go on, the newest first."""
    slowest = min(reader.position for reader in _leading(window))
    behind = slowest - window.limits.lookback_length
    older = [span for span in kept if span.end <= behind]
    return sorted(older, key=lambda span: span.first, reverse=True)


def _distance(span: Span, positions: list[int]) -> int:
    """Return how many batches a consumer reads before it needs the segment."""
    return min(span.first - each for each in positions if each < span.first)


def _missing_bytes(window: Window, kept: tuple[Span, ...], number: int) -> int:
    """Return what the batch would take beyond the budget; 0 or less where it fits."""
    if _open_span(window, kept, number) is not None:
        return 0
    used = sum(span.num_bytes for span in kept)
    return used + window.segment_bytes - _room_bytes(window)


def _open_span(window: Window, kept: tuple[Span, ...], number: int) -> Span | None:
    """Return the segment that a batch can be appended to."""
    for span in kept:
        if span.end == number and 0 < window.batch_bytes <= span.free_bytes:
            return span
    return None


def _room_bytes(window: Window) -> int:
    budget = window.limits.budget_bytes
    return budget if window.room_bytes is None else min(budget, window.room_bytes)


def _budget_text(window: Window, what: str) -> str:
    if _room_bytes(window) < window.limits.budget_bytes:
        return f"{what}: the file system of the cache is full"
    return f"{what}: the budget of {window.limits.budget_bytes >> 20} MiB is full"

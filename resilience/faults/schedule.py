"""Which faults a run gets, where and when. Pure: same numbers in, same faults out.

A fault is scheduled by (rank, place, step), never by time, so that a run with faults can
be repeated. The place is one that the trainer names when it gets there. What a recipe may
ask for is held against its other values by the rules of its job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from resilience.settings import Fault, FaultKind, FaultPlace, FaultsSettings

SLOW_S = 1.0
"""How long a random fault of kind slow takes."""

_Pair = tuple[FaultKind, FaultPlace]


def plan_faults(
    settings: FaultsSettings | None, *, num_steps: int, world_size: int
) -> tuple[Fault, ...]:
    """Return the faults of a run; a fault's index in them is its number on every rank."""
    if settings is None:
        return ()
    if (drawn := settings.random) is None:
        return settings.injected
    return settings.injected + random_faults(
        drawn.seed, num_steps, world_size, drawn.mean_steps_between, drawn.kinds, drawn.places
    )


def random_faults(
    seed: int,
    num_steps: int,
    world_size: int,
    mean_steps_between: int,
    kinds: Sequence[FaultKind],
    places: Sequence[FaultPlace],
) -> tuple[Fault, ...]:
    """Draw faults so that one step in `mean_steps_between` has one, on any one rank.

    The draws for a step depend on nothing but the seed and the step: a longer run begins
    with the faults of a shorter one. A fault in a recovery comes with one that begins it.
    """
    pairs = [(kind, place) for kind in kinds for place in places]
    pairs = [each for each in pairs if each != ("corrupt", "within_update")]
    causes = [(kind, place) for kind, place in pairs if _begins_recovery(kind, place)]
    if not causes:
        pairs = [(kind, place) for kind, place in pairs if place != "recovery"]
    faults: list[Fault] = []
    for step in range(num_steps):
        if _draw(seed, step, "fires") * mean_steps_between < 1 << 64:
            faults += _draw_step(seed, step, world_size, pairs, causes)
    return tuple(faults)


def _begins_recovery(kind: FaultKind, place: FaultPlace) -> bool:
    return kind != "slow" and place != "recovery"


def _draw_step(
    seed: int, step: int, world_size: int, pairs: Sequence[_Pair], causes: Sequence[_Pair]
) -> list[Fault]:
    kind, place = pairs[_draw(seed, step, "pair") % len(pairs)]
    faults = [_draw_fault(seed, step, world_size, kind, place)]
    if place == "recovery":
        kind, place = causes[_draw(seed, step, "cause") % len(causes)]
        faults.append(_draw_fault(seed, step, world_size, kind, place))
    return faults


def _draw_fault(seed: int, step: int, world_size: int, kind: FaultKind, place: FaultPlace) -> Fault:
    is_first = step == 0  # before the first update there are no moments
    is_moment = _draw(seed, step, f"{place} tensor") % 2 == 1 and not is_first
    return Fault(
        kind=kind,
        place=place,
        step=step,
        rank=_draw(seed, step, f"{place} rank") % world_size,
        tensor=("moment" if is_moment else "parameter") if kind == "corrupt" else None,
        seconds=SLOW_S if kind == "slow" else None,
    )


def _draw(seed: int, step: int, what: str) -> int:
    """Return 64 bits that are the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{what}".encode()).digest()[:8], "big")

"""Which faults a run gets, where and when. Pure: same numbers in, same faults out.

A fault is scheduled by (rank, place, step), never by time, so that a run with faults can
be repeated. The place is one that the trainer names when it gets there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from resilience.settings import FaultKind as Kind
from resilience.settings import FaultPlace as Place
from resilience.state.layout import Layout

CorruptTensor = Literal["parameter", "moment"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PLACES: tuple[Place, ...] = get_args(Place)
TENSORS: tuple[CorruptTensor, ...] = get_args(CorruptTensor)
SLOW_S = 1.0
"""How long a random fault of kind slow takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, which fires at most once in a run."""

    kind: Kind
    place: Place
    step: int
    """The step in which it fires, from 0. For the place recovery: it fires in the first
    recovery after which training goes on with this step or a later one."""
    rank: int | None = None
    """The rank that it fires on; excludes `node`."""
    node: int | None = None
    """Index of the node whose local rank 0 it fires on; a sigkill takes all its workers."""
    tensor: CorruptTensor | None = None
    """What is changed by a fault of kind corrupt, and by no other."""
    seconds: float | None = None
    """How long a fault of kind slow takes, and no other."""

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, KINDS)
        _check_choice("place", self.place, PLACES)
        if self.step < 0 or (self.rank or 0) < 0 or (self.node or 0) < 0:
            raise ValueError(
                f"step {self.step}, rank {self.rank}, node {self.node}: all count from 0"
            )
        if (self.rank is None) == (self.node is None):
            raise ValueError(f"rank {self.rank} and node {self.node}; set exactly one of them")
        self._check_options()

    def _check_options(self) -> None:
        if (self.kind == "corrupt") != (self.tensor is not None):
            raise ValueError(
                f"kind {self.kind} with tensor {self.tensor}; corrupt needs tensor, "
                "others have none"
            )
        if (self.kind == "slow") != (self.seconds is not None):
            raise ValueError(
                f"kind {self.kind} with seconds {self.seconds}; slow needs seconds, "
                "others have none"
            )
        if self.tensor is not None:
            _check_choice("tensor", self.tensor, TENSORS)
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}; it has to be positive and finite")
        if not _is_allowed(self.kind, self.place):
            raise ValueError(
                f"kind corrupt has no place {self.place}: a value changed there is overwritten by "
                "the update, or taken for right when it ends; choose another place"
            )


def check_faults(faults: Sequence[Fault], *, num_steps: int, layout: Layout) -> None:
    """Raise ValueError for the first fault that could never fire in such a run."""
    for number, fault in enumerate(faults):
        reason = (
            _find_bound(fault, num_steps, layout)
            if fault.place != "recovery" or _has_cause(fault, faults)
            else f"no fault at step {fault.step} or later begins a recovery for it to fire in"
        )
        if reason:
            raise ValueError(f"fault {number} ({fault.kind} in {fault.place}): {reason}")


def random_faults(
    seed: int,
    num_steps: int,
    world_size: int,
    mean_steps_between: float,
    kinds: Sequence[Kind],
    places: Sequence[Place],
) -> tuple[Fault, ...]:
    """Draw faults so that one step in `mean_steps_between` has one, on any one rank.

    The draws for a step depend on nothing but the seed and the step: a longer run begins
    with the faults of a shorter one. A fault in a recovery comes with one that begins it.
    """
    if mean_steps_between < 1:
        raise ValueError(f"mean_steps_between is {mean_steps_between}; it has to be 1 or more")
    pairs = [(kind, place) for kind in kinds for place in places if _is_allowed(kind, place)]
    causes = [(kind, place) for kind, place in pairs if _begins_recovery(kind, place)]
    if not causes:
        pairs = [(kind, place) for kind, place in pairs if place != "recovery"]
    if not pairs:
        raise ValueError(
            f"kinds {', '.join(kinds)} have no fault in places {', '.join(places)}; "
            "add a place, and beside recovery one that begins a recovery"
        )
    faults: list[Fault] = []
    mean = Fraction(mean_steps_between)  # exact, where floats would round
    for step in range(num_steps):
        if _draw(seed, step, "fires") * mean < 1 << 64:
            faults += _draw_step(seed, step, world_size, pairs, causes)
    return tuple(faults)


def faults_from(
    settings: Mapping[str, Any], *, num_steps: int, layout: Layout
) -> tuple[Fault, ...]:
    """Return the faults of a recipe's `resilience.faults`, checked.

    `injected` is a list of a Fault's fields, `random` null or seed, mean_steps_between,
    kinds and places. A fault's index in the result is its number on every rank.
    """
    faults: list[Fault] = []
    for number, fields in enumerate(settings.get("injected") or ()):
        try:
            faults.append(Fault(**fields))
        except ValueError as error:
            raise ValueError(f"fault {number}: {error}") from error
    if options := settings.get("random"):
        faults += random_faults(num_steps=num_steps, world_size=layout.world_size, **options)
    check_faults(faults, num_steps=num_steps, layout=layout)
    return tuple(faults)


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _is_allowed(kind: str, place: str) -> bool:
    return kind != "corrupt" or place != "within_update"


def _begins_recovery(kind: str, place: str) -> bool:
    return kind != "slow" and place != "recovery"


def _has_cause(fault: Fault, faults: Sequence[Fault]) -> bool:
    """Return whether training goes on from some other fault at the step of this one or later."""
    return any(
        _begins_recovery(other.kind, other.place) and other.step >= fault.step for other in faults
    )


def _find_bound(fault: Fault, num_steps: int, layout: Layout) -> str | None:
    if fault.step >= num_steps:
        return f"step {fault.step} is beyond the last one, {num_steps - 1}"
    if fault.rank is not None and fault.rank >= layout.world_size:
        return f"rank {fault.rank} is beyond the last one, {layout.world_size - 1}"
    if fault.node is not None and fault.node >= len(layout.nodes):
        return f"node {fault.node} is beyond the last one, {len(layout.nodes) - 1}"
    return None


def _draw_step(
    seed: int,
    step: int,
    world_size: int,
    pairs: Sequence[tuple[Kind, Place]],
    causes: Sequence[tuple[Kind, Place]],
) -> list[Fault]:
    kind, place = pairs[_draw(seed, step, "pair") % len(pairs)]
    faults = [_draw_fault(seed, step, world_size, kind, place)]
    if place == "recovery":
        kind, place = causes[_draw(seed, step, "cause") % len(causes)]
        faults.append(_draw_fault(seed, step, world_size, kind, place))
    return faults


def _draw_fault(seed: int, step: int, world_size: int, kind: Kind, place: Place) -> Fault:
    is_first = step == 0  # before the first update there are no moments
    number = _draw(seed, step, f"{place} tensor") % len(TENSORS)
    return Fault(
        kind=kind,
        place=place,
        step=step,
        rank=_draw(seed, step, f"{place} rank") % world_size,
        tensor=TENSORS[0 if is_first else number] if kind == "corrupt" else None,
        seconds=SLOW_S if kind == "slow" else None,
    )


def _draw(seed: int, step: int, what: str) -> int:
    """Return 64 bits that are the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{what}".encode()).digest()[:8], "big")

"""Every fault that a recipe may ask for, and how they are packed into runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from resilience.settings import FaultKind, FaultPlace

KINDS = get_args(FaultKind)
PLACES = get_args(FaultPlace)
TENSORS = ("parameter", "moment")
WORLD_SIZE = 4
SLOW_S = 0.1
REFUSED = {("corrupt", "within_update"), ("corrupt", "recovery")}
"""What the launcher's rules refuse: such a change is overwritten, or taken for right."""

Fault = dict[str, Any]


def all_faults() -> list[Fault]:
    """Return each kind in each place on each rank, without steps."""
    return [
        {"place": place, "rank": rank, **kind}
        for kind in _kinds()
        for place in PLACES
        for rank in range(WORLD_SIZE)
        if (kind["kind"], place) not in REFUSED
    ]


def spread_faults(trainer: str) -> list[Fault]:
    """Return a part of all faults: the two trainers together have each kind in each place."""
    chosen = []
    number = 0
    for kind in _kinds():
        for place in PLACES:
            if (kind["kind"], place) in REFUSED:
                continue
            number += 1
            is_dear = kind["kind"] == "sigstop" and place not in ("forward", "within_update")
            is_ours = number % 2 == (trainer == "ddp")
            if (is_ours or kind["kind"] == "sigkill") and not is_dear:
                chosen.append({"place": place, "rank": number % WORLD_SIZE, **kind})
    return chosen


def one_of_each() -> list[Fault]:
    """Return a fault of each kind, each in another place, without steps."""
    chosen = []
    for number, kind in enumerate(_kinds()):
        places = [each for each in PLACES if (kind["kind"], each) not in REFUSED]
        chosen.append({"place": places[number % len(places)], "rank": number % WORLD_SIZE, **kind})
    return chosen


def pack(faults: Sequence[Fault], num_steps: int) -> Iterator[list[Fault]]:
    """Yield schedules of a fault in every other step, mixed, from step 1 on.

    The step between has every rank back before the next fault, which else could end the last
    copy of a shard. A fault in a recovery comes with one that begins it, on the rank after its
    own, which holds another shard.
    """
    mixed = list(faults)
    random.Random(5).shuffle(mixed)
    room = num_steps // 2 - 1
    for start in range(0, len(mixed), room):
        schedule: list[Fault] = []
        for number, fault in enumerate(mixed[start : start + room]):
            step = 1 + 2 * number
            schedule.append({**fault, "step": step})
            if fault["place"] == "recovery":
                cause = ("exception", "sigkill")[number % 2]
                rank = (fault["rank"] + 1) % WORLD_SIZE
                schedule.append({"kind": cause, "place": "backward", "rank": rank, "step": step})
        yield schedule


def _kinds() -> Iterator[Fault]:
    for kind in KINDS:
        if kind == "corrupt":
            yield from ({"kind": kind, "tensor": tensor} for tensor in TENSORS)
        else:
            yield {"kind": kind} | ({"seconds": SLOW_S} if kind == "slow" else {})

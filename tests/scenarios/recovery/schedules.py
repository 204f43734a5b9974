"""Random faults of many seeds, one after the other in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience.faults.schedule import random_faults
from tests.scenarios.recovery.matrix import KINDS, PLACES, REFUSED, SLOW_S, WORLD_SIZE

NUM_SHARDS = {"ddp": 1, "hybrid": 2}


def draw(
    trainer: str, seeds: Sequence[int], *, steps_per_seed: int, mean_steps_between: int
) -> list[dict[str, Any]]:
    """Return the faults of all seeds, each with steps of its own from step 1 on.

    Every other step has none, so that every rank is back before the next fault.
    """
    faults: list[dict[str, Any]] = []
    for number, seed in enumerate(seeds):
        drawn = random_faults(
            seed, steps_per_seed // 2, WORLD_SIZE, mean_steps_between, KINDS, PLACES
        )
        for each in drawn:
            if (each.kind, each.place) in REFUSED:
                continue
            fault = each.model_dump(exclude_none=True)
            fault["step"] = 1 + number * steps_per_seed + 2 * each.step
            if each.kind == "slow":
                fault["seconds"] = SLOW_S
            faults.append(fault)
    return [each for each in faults if not _may_end_last_copy(trainer, each, faults)]


def _may_end_last_copy(
    trainer: str, fault: dict[str, Any], faults: Sequence[dict[str, Any]]
) -> bool:
    """Say whether a fault in a recovery may hit the one copy that its cause has left."""
    if fault["place"] != "recovery" or NUM_SHARDS[trainer] == 1:
        return False
    num_shards = NUM_SHARDS[trainer]
    return any(
        each["step"] == fault["step"] and each["rank"] % num_shards == fault["rank"] % num_shards
        for each in faults
        if each is not fault
    )

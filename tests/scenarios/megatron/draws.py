"""Faults of Megatron's ranks that chance draws: every layout meets each kind, and each place."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from resilience.settings import FaultPlace

KINDS = ("exception", "sigkill", "sigstop")
PLACES: tuple[str, ...] = get_args(FaultPlace)
_SECOND = "recovery"
"""A place that another fault has to bring a rank to."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: where its faults strike, and what its ranks are."""

    seed: int
    layout: str
    precision: str
    overlaps: bool
    faults: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        words = " then ".join(
            "{kind} at {place} of step {step} on rank {rank}".format(**each) for each in self.faults
        )
        overlap = "-overlap" if self.overlaps else ""
        return f"{self.seed}: {self.layout}-{self.precision}{overlap}, {words}"

    @property
    def values(self) -> dict[str, Any]:
        """Return what the trainer is told besides its layout."""
        is_bf16 = self.precision == "bf16"
        return {
            "precision": self.precision,
            "dropout": 0.1 if is_bf16 else 0.0,
            "overlap_grad_reduce": self.overlaps,
            "overlap_param_gather": self.overlaps,
        }


def draw(layouts: Mapping[str, Sequence[str]], num: int, *, num_steps: int) -> Sequence[Case]:
    """Return `num` cases; `layouts` is the shard of each rank, by layout.

    The first are every layout with every place, and kinds in turn, the others are drawn freely.
    """
    pairs = [
        (layout, place, KINDS[(first + number) % len(KINDS)])
        for first, layout in enumerate(layouts)
        for number, place in enumerate(PLACES)
    ]
    assert len(pairs) <= num
    cases = []
    for seed in range(num):
        chance = random.Random(seed)
        drawn = (chance.choice(list(layouts)), chance.choice(PLACES), chance.choice(KINDS))
        layout, place, kind = pairs[seed] if seed < len(pairs) else drawn
        cases.append(
            Case(
                seed=seed,
                layout=layout,
                precision=chance.choice(("fp32", "bf16")),
                overlaps=chance.random() < 0.5,
                faults=_draw_faults(chance, place, kind, layouts[layout], num_steps),
            )
        )
    return cases


def _draw_faults(
    chance: random.Random, place: str, kind: str, shards: Sequence[str], num_steps: int
) -> tuple[dict[str, Any], ...]:
    """Return one fault, and where its place is a recovery the one that begins that."""
    rank, step = chance.randrange(len(shards)), chance.randrange(1, num_steps - 1)
    own = {"kind": kind, "place": place, "rank": rank, "step": step}
    if place != _SECOND:
        return (own,)
    # Of each shard one copy has to live.
    others = [other for other, shard in enumerate(shards) if shard != shards[rank]]
    cause = {"kind": chance.choice(("exception", "sigkill")), "place": "backward"}
    return ({**cause, "rank": chance.choice(others), "step": step}, own)

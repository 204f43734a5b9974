"""What a rank says about its state after its training thread has stopped. Pure.

A rank's memory holds the state after `step` updates. Its phase says how far it
came in the next one. The rules that make recovery safe:

- A member publishes its report only after its training thread has stopped, and
  for exactly the generation that ends. From then on its phase changes only by
  the plan.
- (step, phase) changes in one assignment, when the update ends.
- A rank that failed within its update, or while it received state, is torn: its
  memory is not trusted, but a tear in the update shows that the gate was passed.
- Gradients and a passed gate stay valid until a new forward begins, over any
  number of generations.
- State counts only if its holder was a member of the generation that ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from resilience.state.layout import Layout

SHARDS = "shards"
"""In `rest`: of how many shards a copy is, where the program says so and not the layout."""


class Phase(str, Enum):
    """How far a rank came in the step after its last update."""

    FRESH = "fresh"
    """The process holds no state: it was just started."""
    COMPUTING = "computing"
    """Whole; the gradients of the next update are not complete."""
    REDUCED = "reduced"
    """Whole; the gradients are complete, and nothing changes them any more."""
    ENTERED = "entered"
    """Whole; the rank has entered the gate and does not know whether all did."""
    PASSED = "passed"
    """Whole; all ranks have entered the gate, so every rank can end the update alone."""
    TORN_UPDATE = "torn_update"
    """Failed between the begin and the end of the update."""
    TORN_REPAIR = "torn_repair"
    """Failed while it received state from another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank holds at the end of a generation."""

    rank: int
    node: str
    generation: int
    """The generation that this report ends."""
    replica: int = 0
    shard: str = ""
    """Which part of a replica the rank owns; equal for the ranks that can repair each other."""
    phase: Phase = Phase.FRESH
    step: int = 0
    """Updates that the memory has seen, which is the index of the next step."""
    step_generation: int = -1
    """Generation whose gradients made the last update; -1 for a state that saw none yet."""
    gradient_generation: int = -1
    """Generation in which the gradients in memory were reduced; -1 where there are none."""
    member_generation: int = -1
    """Last generation that the holder was a member of."""
    is_healthy: bool = True
    """False for a rank whose own check found its state changed."""
    digest: str | None = None
    """Digest of the state at `step`, where digests are on."""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """Small plain data for the others: `saved`, the step of the newest state that is known to be
    saved, from a rank that can save, and `place`, where that lies."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        found = {each: getattr(self, each) for each in _FIELDS}
        return found | {"phase": self.phase.value, "rest": dict(self.rest)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Read back what `to_json` returned."""
        return cls(**{**data, "phase": Phase(data["phase"])})


_FIELDS = tuple(each.name for each in fields(Report))
_OF_SEAT = ("node", "replica", "shard")


def pack_reports(reports: Sequence[Report], layout: Layout) -> dict[str, Any]:
    """Return the reports of all ranks, in their order, as JSON data.

    Most ranks of a large run hold the same: `kinds` has what differs, and `of` the kind of each
    rank. A report's node, replica and shard are left out where they are the layout's.
    """
    kinds: dict[str, int] = {}
    numbers = []
    for rank, report in enumerate(reports):
        seat = layout.seat(rank)
        data = {
            name: value
            for name, value in report.to_json().items()
            if name != "rank" and (name not in _OF_SEAT or value != getattr(seat, name))
        }
        numbers.append(kinds.setdefault(json.dumps(data), len(kinds)))
    return {"kinds": [json.loads(kind) for kind in kinds], "of": numbers}


def unpack_reports(packed: Mapping[str, Any], layout: Layout) -> tuple[Report, ...]:
    """Read back what `pack_reports` returned for this layout."""
    reports = []
    for rank, kind in enumerate(packed.get("of", ())):
        seat = layout.seat(rank)
        data = {name: getattr(seat, name) for name in _OF_SEAT} | packed["kinds"][kind]
        reports.append(Report.from_json({**data, "rank": rank}))
    return tuple(reports)


def fresh_report(layout: Layout, rank: int, generation: int) -> Report:
    """Return the report of a rank whose process holds no state yet."""
    seat = layout.seat(rank)
    return Report(
        rank=rank,
        node=seat.node,
        generation=generation,
        replica=seat.replica,
        shard=seat.shard,
        phase=Phase.FRESH,
    )

"""What the counting program's ranks have noted, held against what a run promises. Pure.

The ranks are on one machine, whose one clock stands in each note.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.scenarios.membership.agents.counting import digests


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A rank has noted something, see `counting_program`."""

    what: str
    generation: int
    rank: int
    node: str
    pid: int
    at_s: float
    fields: dict[str, Any] = field(default_factory=dict)


def read_note(line: str) -> Noted:
    words = json.loads(line)
    own = {name: words.pop(name) for name in ("what", "generation", "rank", "node", "pid", "at_s")}
    return Noted(**own, fields=words)


@dataclass
class History:
    """All notes of a run, in the order in which they were written."""

    num_ranks: int
    num_shards: int = 1
    is_sharded: bool = False
    notes: list[Noted] = field(default_factory=list)

    def of(self, what: str) -> list[Noted]:
        return [each for each in self.notes if each.what == what]

    def problems(self, living: Collection[int], *, loses: bool = False) -> list[str]:
        """Return every promise that was broken; `living` are processes that never ended.

        A run that `loses` may have waited for the last holder of a shard as long as it was to.
        """
        return [
            *self._two_worlds(),
            *self._gates_out_of_order(),
            *self._wrong_values(),
            *self._gaps(),
            *(() if loses else self._lost_steps(living)),
        ]

    # ---- one world

    def _two_worlds(self) -> Iterator[str]:
        """Tell of a generation with two sets of members, and of a rank that two have."""
        members: dict[int, tuple[Any, ...]] = {}
        owners: dict[tuple[int, int], int] = {}
        for each in self.of("enter"):
            own = (each.fields["nodes"], each.fields["starts"])
            if members.setdefault(each.generation, own) != own:
                yield f"generation {each.generation} has members {own}, and {members}"
            place = (each.generation, each.rank)
            if owners.setdefault(place, each.pid) != each.pid:
                yield f"rank {each.rank} of generation {each.generation} is two processes"

    def _gates_out_of_order(self) -> Iterator[str]:
        """Tell of a gate that a rank has entered, and passed, after one of a newer generation."""
        entered: dict[int, float] = {}
        passed: dict[int, float] = {}
        for each in self.of("pass"):
            number = each.generation
            entered[number] = max(entered.get(number, 0.0), each.fields["begun_s"])
            passed[number] = min(passed.get(number, float("inf")), each.at_s)
        for old in entered:
            for new in passed:
                if old < new and entered[old] > passed[new]:
                    yield f"a gate of generation {old} was passed after one of generation {new}"

    # ---- what ranks hold

    def _wrong_values(self) -> Iterator[str]:
        noted = [*self.of("pass"), *self.of("end")]
        num_steps = max((each.fields["step"] for each in noted), default=0)
        known = {
            shard: digests(shard, num_ranks=self.num_ranks, num_steps=num_steps)
            for shard in {self._shard(rank) for rank in range(self.num_ranks)}
        }
        for each in noted:
            step = each.fields["step"]
            if each.fields["digest"] != known[self._shard(each.rank)][step]:
                yield f"rank {each.rank} had wrong values before step {step}: {each}"

    def _gaps(self) -> Iterator[str]:
        """Tell of a rank that begins a generation elsewhere than others, or leaves a step out."""
        begins: dict[int, int] = {}
        nexts: dict[tuple[int, int], int] = {}
        for each in self.notes:
            if each.what == "enter":
                continue
            step, place = each.fields["step"], (each.generation, each.rank)
            if each.what == "resume":
                if begins.setdefault(each.generation, step) != step:
                    yield f"generation {each.generation} begins at {begins} and at {step}"
                nexts[place] = step
            elif nexts.get(place) != step:
                yield f"{each} comes after {nexts.get(place)}"
            nexts[place] = step + (each.what == "pass")

    def _lost_steps(self, living: Collection[int]) -> Iterator[str]:
        """Tell of a generation that begins behind a step that living members held."""
        begun: set[int] = set()
        for number, each in enumerate(self.notes):
            if each.what != "resume" or each.generation in begun:
                continue
            begun.add(each.generation)
            lived = {other.pid for other in self.notes[number:]} | set(living)
            held = self._held(self.notes[:number], each.generation, lived)
            if each.fields["step"] < held:
                yield (
                    f"generation {each.generation} begins at step {each.fields['step']}, and "
                    f"processes that lived on held step {held}"
                )

    def _held(self, before: Sequence[Noted], generation: int, lived: Collection[int]) -> int:
        """Return the newest step that living members of the last generation held whole.

        A place that was given to another node since is not given back: who had it counts no more.
        Who loses it now was silent, and may have passed one gate alone: that step is run again.
        """
        passes = [each for each in before if each.what == "pass" and each.generation < generation]
        last = max((each.generation for each in passes), default=-1)
        members = {
            each.generation: set(zip(each.fields["nodes"], each.fields["starts"], strict=True))
            for each in self.of("enter")
        }
        if last < 0:
            return 0
        between = [number for number in members if last < number < generation]
        starts = dict(members[last])
        held: dict[str, int] = defaultdict(int)
        for each in passes:
            own = (each.node, starts.get(each.node))
            has_place = all(own in members[number] for number in between)
            if each.generation == last and each.pid in lived and has_place:
                shard, is_asked = self._shard(each.rank), own in members[generation]
                held[shard] = max(held[shard], each.fields["step"] + is_asked)
        return min(held[self._shard(rank)] for rank in range(self.num_shards))

    def _shard(self, rank: int) -> str:
        return str(rank % self.num_shards) if self.is_sharded else ""

"""The step and the state that a generation begins with, by how far each rank is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from resilience.errors import StateError, StateLostError
from resilience.state.layout import Layout


class RankProgress(NamedTuple):
    """Progress of one rank."""

    is_new: bool
    """Its set-up was replayed: it has no state yet."""
    step: int
    """Updates that its state has seen."""
    done: int
    """The last step whose functions have ended on it."""
    first: int
    """The step that its program begins with."""


def find_done(told: Sequence[RankProgress]) -> tuple[int, int]:
    """Return the newest step, and the last whose functions have ended on all ranks. Pure."""
    at = max(-1 if each.is_new else each.step for each in told)
    # A rank has ended them where all have; one that begins at a checkpoint calls none of its step.
    held = [each for each in told if not each.is_new and each.step == at]
    return at, max((max(each.done, each.first) for each in held), default=-1)


def find_first_step(told: Sequence[RankProgress]) -> int:
    """Return the step that a run begins with.

    A rank whose set-up was replayed may have found a newer checkpoint than the others did. Raises
    StateError where the others differ. Pure.
    """
    found = {each.first for each in told if not each.is_new}
    if len(found) > 1:
        raise StateError(
            f"ranks begin with different steps: {', '.join(map(str, sorted(found)))}; have all "
            "ranks load one checkpoint with run.load_state_dict()"
        )
    if not found:
        raise StateLostError("no rank of the first set-up is left; start the run again")
    return found.pop()


def plan_first_state(layout: Layout, is_new: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Return transfers (source, target, is_same_node) to the ranks whose set-up was replayed.

    Raises StateLostError where no rank of the first set-up has a shard. Pure.
    """
    sources: dict[str, int] = {}
    for rank in range(layout.world_size):
        if not is_new[rank]:
            sources.setdefault(layout.seat(rank).shard, rank)
    found = []
    for target in (rank for rank in range(layout.world_size) if is_new[rank]):
        seat = layout.seat(target)
        if seat.shard not in sources:
            name = f" that holds shard {seat.shard}" if seat.shard else ""
            raise StateLostError(f"no rank of the first set-up{name} is left; start the run again")
        source = sources[seat.shard]
        found.append((source, target, layout.seat(source).node == seat.node))
    return found

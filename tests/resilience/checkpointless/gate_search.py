"""Visits all states of gate_model.py, nearest first."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from resilience.checkpointless.plan import Fallback, RecoveryPlan
from tests.resilience.checkpointless.gate_model import Mode, Model, World, ask, find_breaks

SYMMETRIES = ((0, 1, 2, 3), (2, 3, 0, 1))
"""Swap replicas, and so nodes."""


class Outcome(NamedTuple):
    num_states: int
    num_finished: int
    num_fallbacks: int
    breaks: dict[str, str]
    """What is broken, with the shortest way there."""
    plans: set[RecoveryPlan | Fallback]
    """Each answer that was given."""


def explore(model: Model, *, stop_at_break: bool = True) -> Outcome:
    """Visit every reachable state, nearest first."""
    first = model.begin()
    came: dict[World, tuple[World | None, str]] = {first: (None, "")}
    seen = {canonical(first)}
    queue = deque([first])
    breaks: dict[str, str] = {}
    plans: set[RecoveryPlan | Fallback] = set()
    num_finished = num_fallbacks = 0

    def note(text: str, world: World, label: str) -> None:
        breaks.setdefault(text, "; ".join([*_retrace(came, world), label]))

    while queue and not (breaks and stop_at_break):
        world = queue.popleft()
        num_fallbacks += world.fallback
        if _is_finished(model, world):
            num_finished += 1
        if world.fallback or _is_finished(model, world):
            continue
        moves = list(model.moves(world))
        if not moves:
            note("deadlock", world, "nothing can happen")
            continue
        if moves[-1][0] == "plan":
            plans.add(ask(model.claims(world)))
        for label, after in (*moves, *model.faults(world)):
            for text in find_breaks(model, label, world, after):
                note(text, world, label)
            least = canonical(after)
            if least not in seen:
                seen.add(least)
                came[after] = (world, label)
                queue.append(after)
    return Outcome(len(seen), num_finished, num_fallbacks, breaks, plans)


def _is_finished(model: Model, world: World) -> bool:
    return all(rank.mode == Mode.RUN and len(rank.past) == model.num_steps for rank in world.ranks)


def _retrace(came: dict[World, tuple[World | None, str]], world: World | None) -> list[str]:
    labels: list[str] = []
    while world is not None:
        world, label = came[world]
        labels.append(label)
    return [label for label in reversed(labels) if label]


def canonical(world: World) -> World:
    """Return the least of the worlds that differ by the names of replicas only.

    A shard has two holders, so a rank in need has one source at most, whatever its name.
    """
    ranks = world.ranks
    least = ranks
    for order in SYMMETRIES[1:]:
        named = tuple(
            rank if rank.source < 0 else rank._replace(source=order.index(rank.source))
            for rank in (ranks[i] for i in order)
        )
        least = min(least, named)
    return world._replace(ranks=least)

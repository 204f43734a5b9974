"""Visits all worlds that a model's world can become, or goes through them at random."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from resilience.agent.coordination.membership import Stage
from tests.scenarios.simulation.model import Model
from tests.scenarios.simulation.model_agent import ends_at_last
from tests.scenarios.simulation.model_world import (
    GONE,
    REPAIR,
    STEP,
    TROUBLE,
    UP,
    Draft,
    Move,
    World,
)


class Explored(NamedTuple):
    num_worlds: int
    num_moves: int
    num_generations: int
    """The most that were opened on one way."""
    is_complete: bool
    """Whether every world was visited."""
    breaks: dict[str, str]
    """What is broken, with the shortest way there."""

    def __str__(self) -> str:
        words = "all" if self.is_complete else "the first"
        return (
            f"{words} {self.num_worlds} worlds, {self.num_moves} moves, up to "
            f"{self.num_generations} generations, breaks: {self.breaks or 'none'}"
        )


class _Search:
    def __init__(self, model: Model, first: World) -> None:
        self.model = model
        self.numbers = {first: 0}
        self.parents, self.labels = array("I", [0]), [""]
        self.ways = {kind: (array("I"), array("I")) for kind in (STEP, REPAIR)}
        """From and to, of all moves that are no troubles."""
        self.may_go_on = bytearray(1)
        """By world, whether the rules let somebody go on while nothing gets better."""
        self.is_good = bytearray(1)
        """By world, whether a generation's workers are all in it."""
        self.breaks: dict[str, str] = {}
        self.num_moves = self.num_generations = 0
        self._are_ending: dict[int, bool] = {}

    def note(self, text: str, number: int, label: str = "") -> None:
        if text not in self.breaks:
            labels = [label]
            while number:
                labels.append(self.labels[number])
                number = self.parents[number]
            self.breaks[text] = "; ".join(reversed(labels))

    def visit(self, number: int, world: World) -> Iterator[World]:
        """Take in all that may happen, and yield the worlds that are new by it."""
        moves = list(self.model.moves(world))
        self.num_moves += len(moves)
        self.num_generations = max(self.num_generations, len(world.chosen))
        self.is_good[number] = bool(self.model.find_groups(world))
        self.may_go_on[number] = may_go_on(self.model, world)
        for text in self.find_waits(world, moves):
            self.note(text, number)
        for move in moves:
            if move.breaks:
                self.note(move.breaks, number, move.label)
            other = self.numbers.setdefault(move.world, len(self.numbers))
            if move.kind != TROUBLE:
                self.ways[move.kind][0].append(number)
                self.ways[move.kind][1].append(other)
            if other == len(self.parents):
                self.parents.append(number)
                self.labels.append(move.label)
                self.is_good.append(0)
                self.may_go_on.append(0)
                yield move.world

    def find_waits(self, world: World, moves: list[Move]) -> Iterator[str]:
        """Yield who waits for ever."""
        is_waiting = False
        for number, mode in enumerate(world.modes):
            agent = self.model.book.agent(world.agents[number])
            if mode != UP or agent.state is None or agent.state.stage == Stage.RUNNING:
                continue
            is_waiting = True
            key = world.agents[number]
            if key not in self._are_ending:
                self._are_ending[key] = ends_at_last(agent)
            if not self._are_ending[key]:
                yield f"no deadline: a coordinator that is {agent.state.stage}"
        is_moving = is_waiting or any(each.kind == STEP for each in moves)
        if UP in world.modes and not is_moving and not self.is_good[self.numbers[world]]:
            yield "no deadline: nobody does anything"

    def find_stuck(self) -> None:
        """Find worlds that no run without further troubles leads out of."""
        by_steps = self._find_reaching([STEP])
        by_all = self._find_reaching([STEP, REPAIR])
        for number, may in enumerate(self.may_go_on):
            if not by_all[number]:
                self.note("stuck: no generation can follow, whoever comes back", number)
            if may and not by_steps[number]:
                self.note("stuck: the rules let these go on", number)

    def _find_reaching(self, kinds: list[str]) -> bytearray:
        """Return by world whether such moves lead to workers that are in a generation together."""
        found = bytearray(self.is_good)
        before: list[list[int]] = [[] for _ in found]
        for kind in kinds:
            for begin, end in zip(*self.ways[kind], strict=True):
                if not found[begin]:
                    before[end].append(begin)
        waiting = deque(number for number, good in enumerate(found) if good)
        while waiting:
            for number in before[waiting.popleft()]:
                if not found[number]:
                    found[number] = 1
                    waiting.append(number)
        return found


def may_go_on(model: Model, world: World) -> bool:
    """Return whether the rules let agents that are awake and see each other go on by themselves.

    They hold all that was committed, and more than half of the newest generation's places. What
    half may do, by the record of the next number, is not judged here.
    """
    alive = [each for each in range(model.num_agents) if world.modes[each] != GONE]
    agents = {each: model.book.agent(world.agents[each]) for each in alive}
    awake = [each for each in alive if world.modes[each] == UP]
    newest = max((each.standing.generation for each in agents.values()), default=-1)
    if newest < 0 or len(awake) < model.options.num_nodes:
        return False
    cut = [(one, other) for one, other in world.cuts if one in awake and other in awake]
    if cut:
        return False
    layouts = {
        agents[each].standing.layout for each in awake if agents[each].standing.generation == newest
    }
    if len(layouts) != 1:
        return False
    (layout,) = layouts
    assert layout is not None
    here = sum(layout.place_of(agents[each].name, agents[each].start) >= 0 for each in awake)
    holders = [
        each for each in Draft(model.book, world).holders() if model.names.index(each.name) in awake
    ]
    if not Draft(model.book, world).hold_all(holders):
        return False
    return 2 * here > len(layout.nodes)


def explore(
    model: Model, first: World, *, worlds_max: int = 1 << 62, stops_at_break: bool = True
) -> Explored:
    """Visit every world, nearest first, until a promise is broken."""
    search = _Search(model, first)
    queue = deque([(0, first)])
    while queue and len(search.parents) < worlds_max and not (search.breaks and stops_at_break):
        number, world = queue.popleft()
        for found in search.visit(number, world):
            queue.append((len(search.parents) - 1, found))
    if not queue:
        search.find_stuck()
    return Explored(
        len(search.parents),
        search.num_moves,
        search.num_generations,
        not queue,
        search.breaks,
    )


CALM_MOVES_MAX = 3000
"""By then a run without further troubles goes on, by chance alone."""


def wander(model: Model, first: World, seed: int, *, num_moves: int) -> str:
    """Return what is broken on one way that chance takes, with the way there; empty for nothing.

    Once as many moves are made no further troubles come, and the run has to go on.
    """
    chance, world, labels = random.Random(seed), first, list[str]()
    for number in range(num_moves + CALM_MOVES_MAX):
        is_calm = number >= num_moves
        if is_calm and model.find_groups(world):
            return ""
        moves = [each for each in model.moves(world) if not is_calm or each.kind != TROUBLE]
        if not moves:
            break
        move = chance.choice(moves)
        labels.append(move.label)
        if move.breaks:
            return f"{move.breaks}: {'; '.join(labels)}"
        world = move.world
    return "" if model.find_groups(world) else f"stuck: {'; '.join(labels)}"

"""The world of the model: what there is at one moment, and how it changes.

Messages of a connection arrive in their order. Each end of a connection ends it for itself; the
other one finds out by what comes last, or by itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from resilience.agent.coordination.membership import Stage
from tests.scenarios.simulation.model_agent import Agent
from tests.scenarios.simulation.model_book import EVERYONE, Book, Folder

UP, PAUSED, GONE = "up", "paused", "gone"
END = -1
"""In a queue: the connection has ended."""

ANY = -1
"""Among layouts: patience has ended, and whatever was decided since is safe."""


class Troubles(NamedTuple):
    """What may still go wrong."""

    losses: int = 0
    pauses: int = 0
    cuts: int = 0
    resets: int = 0
    """Connections that end with all that is on its way."""
    rivals: int = 0
    """Agents that lead although they could follow another one."""
    patience: int = 0
    """Coordinators that wait no longer for the last holder of a shard."""


class World(NamedTuple):
    """All that there is; equal worlds have equal futures."""

    agents: tuple[int, ...]
    """Numbers of the model's agents; of one that is gone the last one that was."""
    modes: tuple[str, ...]
    queues: tuple[tuple[int, ...], ...]
    """What is on its way, from each agent to each: numbers of the model's messages, or END."""
    questions: tuple[tuple[int, ...], ...]
    """What each agent has asked of the folder."""
    folder: int
    cuts: frozenset[tuple[int, int]]
    committed: tuple[int, int, int]
    """The newest generation that has committed, its layout, and its steps; -1 each before."""
    safe: frozenset[int]
    """Layouts that were decided on since then by who knew that their members hold all there is."""
    chosen: tuple[tuple[int, int], ...]
    """Each generation since then that has come about, and its layout."""
    left: Troubles


class Move(NamedTuple):
    label: str
    world: World
    kind: str
    """What it is: a step, a trouble, or the end of one."""
    breaks: str = ""
    """What promise it breaks."""


STEP, TROUBLE, REPAIR = "step", "trouble", "repair"


class Draft:
    """A world that is being made."""

    def __init__(self, book: Book, world: World) -> None:
        self.book, self.before = book, world
        self.agents, self.modes = list(world.agents), list(world.modes)
        self.queues, self.questions = list(world.queues), list(world.questions)
        self.folder, self.cuts, self.left = world.folder, world.cuts, world.left
        self.committed, self.safe = world.committed, world.safe
        self.chosen = world.chosen
        self.breaks = ""

    def end(self, label: str, kind: str = STEP) -> Move:
        self.book.shrink(self.agents, self.queues)
        if not self._can_found():
            self._forget_founding()
        world = World(
            tuple(self.agents),
            tuple(self.modes),
            tuple(self.queues),
            tuple(self.questions),
            self.folder,
            self.cuts,
            self.committed,
            self.safe,
            self.chosen,
            self.left,
        )
        return Move(label, world, kind, self.breaks)

    def _can_found(self) -> bool:
        """Return whether somebody asks who may begin the run, or so many newcomers can be here."""
        newcomers = self.left.losses
        for number, mode in enumerate(self.modes):
            agent = self.agent(number)
            if agent.state is not None and agent.state.stage == Stage.GATHERING:
                return True
            if any(map(self.book.is_founding, self.questions[number])):
                return True
            newcomers += mode == GONE or agent.standing.generation < 0
        return newcomers >= self.book.options.num_nodes

    def _forget_founding(self) -> None:
        """Leave out who belongs to the run, which nobody will ask the folder for any more."""
        found, records = self.book.folder(self.folder)
        if found is not None:
            self.folder = self.book.enter_folder(Folder(None, records))
        for number, asked in enumerate(self.questions):
            if any(map(self.book.is_renewal, asked)):
                self.questions[number] = tuple(
                    each for each in asked if not self.book.is_renewal(each)
                )

    def agent(self, number: int) -> Agent:
        return self.book.agent(self.agents[number])

    def take(self, number: int, verb: str, *args: Hashable) -> None:
        """Have an agent do something, and let it have its effects."""
        done = self.book.turn(self.agents[number], verb, *args)
        self.agents[number] = done.agent
        for to, item in done.said:
            for other in range(len(self.modes)) if to == EVERYONE else (to,):
                if other != number:
                    self.send(number, other, item)
        for question in done.asked:
            self.ask(number, question)
        for layout, step in done.decided:
            self.decide(layout, step)
        for generation, layout, begin in done.chosen:
            self.come_about(generation, layout, begin)

    def ask(self, one: int, question: int) -> None:
        """Ask the folder; of two words in a row on who belongs to the run the last one counts."""
        asked = self.questions[one]
        if asked and self.book.is_renewal(question) and self.book.is_renewal(asked[-1]):
            asked = asked[:-1]
        self.questions[one] = (*asked, question)

    # ---- connections

    def way(self, one: int, other: int) -> int:
        return one * len(self.modes) + other

    def send(self, one: int, other: int, item: int) -> None:
        """Put something on its way, if the connection is still there."""
        there, back = self.way(one, other), self.way(other, one)
        is_up = self.modes[other] != GONE and END not in self.queues[back]
        names = self.book.names
        follows = self.agent(one).link == names[other]
        is_led = self.agent(other).link == names[one]
        if is_up and (follows or is_led):
            self.queues[there] += (item,)

    def hang_up(self, one: int, other: int) -> None:
        """End a connection at one end."""
        there, back = self.way(one, other), self.way(other, one)
        is_new = END not in self.queues[back]
        if is_new:
            self.queues[there] += (END,)
            self.queues[back] = ()
        else:
            # The other end had ended it before; what it has said since belongs to another one.
            self.queues[back] = self.queues[back][self.queues[back].index(END) + 1 :]

    def lose_leader(self, one: int) -> None:
        """Have a follower give its coordinator up."""
        other = self.book.names.index(self.agent(one).link)
        back = self.way(other, one)
        if END not in self.queues[back]:
            self.queues[self.way(one, other)] += (END,)
        self.queues[back] = ()
        self.take(one, "lose_leader")

    def kill(self, one: int) -> None:
        """End a process: its connections end, and what was sent to it is gone."""
        self.modes[one] = GONE
        name = self.book.names[one]
        for other in range(len(self.modes)):
            there, back = self.way(one, other), self.way(other, one)
            is_linked = name == self.agent(other).link or self.queues[there]
            is_linked = is_linked or self.agent(one).link == self.book.names[other]
            if self.modes[other] == GONE:
                self.queues[there] = ()
            elif is_linked and self.queues[there][-1:] != (END,):
                self.queues[there] += (END,)
            self.queues[back] = ()

    # ---- promises

    def holders(self) -> list[Agent]:
        """Return who holds the newest committed step."""
        generation, layout, step = self.committed
        if generation < 0:
            return []
        members = self.book.layout(layout)
        return [
            agent
            for number, agent in enumerate(map(self.book.agent, self.before.agents))
            if self.before.modes[number] != GONE
            and (agent.entered, agent.entered_layout) == (generation, members)
            and agent.step == step
        ]

    def hold_all(self, holders: list[Agent]) -> bool:
        """Return whether these hold each shard of the newest committed step."""
        if not holders:
            return False
        layout = self.book.layout(self.committed[1])
        held = {layout.seat(layout.index_of(each.name)).shard for each in holders}
        return held == {layout.seat(rank).shard for rank in range(layout.world_size)}

    def decide(self, layout: int, step: int) -> None:
        """Note a decision by which others are given up while its members hold all that there is."""
        if step >= self.committed[2]:
            self.safe |= {layout}

    def lose_patience(self, one: int) -> None:
        """Go on without the state of agents that were waited for long enough."""
        self.safe |= {ANY}
        self.take(one, "lose_patience")

    def come_about(self, generation: int, layout: int, begin: int) -> None:
        if generation < self.committed[0]:
            # Late words, by which nothing can begin: its members are elsewhere.
            return
        found = dict(self.chosen)
        if found.setdefault(generation, layout) != layout:
            self.breaks = f"two successors: both are generation {generation}"
        self.chosen = tuple(sorted(found.items()))
        since = {each for number, each in self.chosen if self.committed[0] < number <= generation}
        # Another coordinator may open once more what has begun already; nobody enters it again.
        is_safe = generation == self.committed[0] or not self.safe.isdisjoint({ANY, *since})
        if begin < self.committed[2] and not is_safe and self.hold_all(self.holders()):
            self.breaks = f"lost: generation {generation} begins at {begin}, and others hold more"

    def commit(self, generation: int, layout: int, members: list[int]) -> None:
        if self.committed[0] >= generation:
            self.breaks = f"two worlds: generation {generation} commits after {self.committed[0]}"
        begun = self.agent(members[0]).begun
        if any(self.agent(number).begun != begun for number in members):
            self.breaks = f"mixed: members of generation {generation} begin at different steps"
        self.committed, self.safe = (generation, layout, begun + 1), frozenset()
        self.chosen = tuple(each for each in self.chosen if each[0] >= generation)
        for number in members:
            self.take(number, "commit")

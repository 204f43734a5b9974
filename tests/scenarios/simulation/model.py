"""All interleavings of the agents of one run: pauses, losses, returns, cuts, a slow disk.

`model_agent` says what one agent does, by the product's own rules; here is what is between them.
Time is left out: a lease ends as soon as its other end stands still or is cut off, and the last
call whenever it likes; patience ends where a test says so. Messages of a connection arrive in their
order, at any time, or not at all: one that has ended loses what was on its way, or not. Whom an
agent follows is open: an agent without a coordinator may follow any that it can reach, and leads
where it can reach none. As many more as a test says lead beside one that could be followed.
Word from elsewhere that an agent has ended is left out: who is gone is silent until it returns.

Each generation commits one step, which is what two worlds and lost steps are seen by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from resilience.agent.coordination import founding, succession
from resilience.agent.coordination.events import Claimed, Judged
from resilience.agent.coordination.membership import Options, Stage
from resilience.comm.messages import Join
from resilience.state.layout import Layout
from tests.scenarios.simulation.model_agent import (
    LAST_CALL_S,
    LEASE_S,
    NEVER_S,
    PATIENCE_S,
    Agent,
    Claim,
    Found,
)
from tests.scenarios.simulation.model_book import Book, Done, Folder
from tests.scenarios.simulation.model_world import (
    END,
    GONE,
    PAUSED,
    REPAIR,
    STEP,
    TROUBLE,
    UP,
    Draft,
    Move,
    Troubles,
    World,
)

NONE = Troubles()


class Model:
    """What may happen in a run of so many nodes."""

    def __init__(
        self,
        num_nodes: int,
        num_standby: int,
        troubles: Troubles = NONE,
        *,
        shares_folder: bool = True,
        is_sharded: bool = False,
    ) -> None:
        self.troubles, self.shares_folder = troubles, shares_folder
        self.names = [f"n{number}" for number in range(num_nodes + num_standby)]
        self.num_agents = len(self.names)
        self.options = Options(
            num_nodes=num_nodes,
            num_standby_nodes=num_standby,
            num_local_ranks=1,
            num_shards=num_nodes if is_sharded else 1,
            is_sharded=is_sharded,
            last_call_s=LAST_CALL_S,
            lease_s=LEASE_S,
            join_deadline_s=NEVER_S,
            partition_patience_s=PATIENCE_S,
            restarts_max=10**9,
            restarts_without_progress_max=10**9,
        )
        self.book = Book(self.names, self.options, shares_folder=shares_folder)

    def begin(self) -> World:
        """Return a world of agents that have just come."""
        num = self.num_agents
        return World(
            tuple(self.book.enter(name, 0) for name in self.names),
            (UP,) * num,
            ((),) * (num * num),
            ((),) * num,
            self.book.enter_folder(Folder(None, ())),
            frozenset(),
            (-1, -1, -1),
            frozenset(),
            (),
            self.troubles,
        )

    def begun(self) -> World:
        """Return the world in which a run without troubles has committed its first step."""
        world = self.begin()
        while True:
            moves = [each for each in self.moves(world) if each.kind == STEP]
            ranked = sorted(moves, key=lambda each: _ORDER.index(each.label.split()[1]))
            if world.committed[0] >= 0 and not any("hears" in each.label for each in moves):
                return world
            world = ranked[0].world

    # ---- what may happen

    def moves(self, world: World) -> Iterator[Move]:
        """Yield all that may happen next."""
        for number, mode in enumerate(world.modes):
            if mode == UP:
                yield from self._go_on(world, number)
            yield from self._ask_folder(world, number)
        yield from self._commit(world)
        yield from self._lose_messages(world)
        yield from self._get_better(world)
        yield from self._get_worse(world)

    def reaches(self, world: World, one: int, other: int) -> bool:
        """Return whether what one agent says arrives at another one that is awake."""
        is_cut = (min(one, other), max(one, other)) in world.cuts
        return one != other and world.modes[other] == UP and not is_cut

    def is_silent(self, world: World, one: int, other: int) -> bool:
        """Return whether nothing comes from an agent, not even the end of a connection."""
        is_cut = (min(one, other), max(one, other)) in world.cuts
        return is_cut or world.modes[other] == PAUSED

    def _go_on(self, world: World, number: int) -> Iterator[Move]:
        agent, name = self.book.agent(world.agents[number]), self.names[number]
        for other in range(self.num_agents):
            if world.queues[other * self.num_agents + number] and (
                (min(number, other), max(number, other)) not in world.cuts
            ):
                yield self._hear(world, number, other)
        if agent.state is not None:
            yield from self._look(world, number)
        elif not agent.link:
            yield from self._seek(world, number)
        else:
            if self.is_silent(world, number, self.names.index(agent.link)):
                draft = Draft(self.book, world)
                draft.lose_leader(number)
                yield draft.end(f"{name} loses {agent.link}")
        if not agent.is_broken and self._has_lost_group(world, agent):
            draft = Draft(self.book, world)
            draft.take(number, "break_group")
            yield draft.end(f"{name} breaks")

    def _hear(self, world: World, number: int, other: int) -> Move:
        draft, name, said = Draft(self.book, world), self.names[number], self.names[other]
        way = draft.way(other, number)
        item, draft.queues[way] = world.queues[way][0], world.queues[way][1:]
        agent = self.book.agent(world.agents[number])
        present = agent.state.present if agent.state else ()
        if item == END:
            if agent.link == said:
                draft.queues[draft.way(other, number)] = ()
                draft.take(number, "see_leader_end")
            elif said in present:
                draft.take(number, "see_follower_end", said)
            return draft.end(f"{name} hears the end of {said}")
        message = self.book.item(item)[0]
        kind = type(message).__name__
        if isinstance(message, Join) and agent.state is None:
            draft.hang_up(number, other)
        elif agent.link == said:
            draft.take(number, "hear_leader", item)
        elif isinstance(message, Join) or said in present:
            draft.take(number, "hear_follower", said, item)
        return draft.end(f"{name} hears {kind} of {said}")

    def _look(self, world: World, number: int) -> Iterator[Move]:
        """Yield what a coordinator may do by itself."""
        agent, name = self.book.agent(world.agents[number]), self.names[number]
        assert agent.state is not None
        if agent.state.stage != Stage.RUNNING and self.book.turn(
            world.agents[number], "tick"
        ) != Done(world.agents[number], (), (), (), ()):
            draft = Draft(self.book, world)
            draft.take(number, "tick")
            yield draft.end(f"{name} looks")
        if world.left.patience and agent.state.stage == Stage.STOPPING:
            draft = Draft(self.book, world)
            draft.left = world.left._replace(patience=world.left.patience - 1)
            draft.lose_patience(number)
            yield draft.end(f"{name} has waited enough", TROUBLE)
        for follower in agent.state.present:
            other = self.names.index(follower)
            if other != number and self.is_silent(world, number, other):
                draft = Draft(self.book, world)
                draft.take(number, "lose_follower", follower)
                draft.hang_up(number, other)
                yield draft.end(f"{name} loses {follower}")
        if any(self._yields(world, number, other) for other in range(self.num_agents)):
            draft = Draft(self.book, world)
            draft.take(number, "resign")
            for other, each in enumerate(map(self.book.agent, world.agents)):
                way = draft.way(number, other)
                is_led = each.link == name and world.modes[other] != GONE
                if is_led and END not in draft.queues[way]:
                    draft.queues[way] += (END,)
                draft.queues[draft.way(other, number)] = ()
            yield draft.end(f"{name} resigns")

    def _yields(self, world: World, number: int, other: int) -> bool:
        """Return whether a coordinator gives way to another one."""
        agent, rival = self.book.agent(world.agents[number]), self.book.agent(world.agents[other])
        if rival.state is None or not self.reaches(world, number, other):
            return False
        assert agent.state is not None
        if agent.state.stage == Stage.RUNNING:
            return rival.hello.generation > agent.hello.generation
        return succession.is_before(rival.hello, agent.hello)

    def _seek(self, world: World, number: int) -> Iterator[Move]:
        agent, name = self.book.agent(world.agents[number]), self.names[number]
        can_follow = False
        for other, leader in enumerate(map(self.book.agent, world.agents)):
            if leader.state is None or not self.reaches(world, number, other):
                continue
            if leader.standing.generation < agent.standing.generation:
                continue
            can_follow = True
            draft = Draft(self.book, world)
            draft.queues[draft.way(other, number)] = ()
            draft.take(number, "follow", leader.name, leader.ballot)
            yield draft.end(f"{name} follows {leader.name}")
        if not can_follow or world.left.rivals:
            draft = Draft(self.book, world)
            draft.take(number, "lead")
            if can_follow:
                draft.left = world.left._replace(rivals=world.left.rivals - 1)
            yield draft.end(f"{name} leads")

    def _has_lost_group(self, world: World, agent: Agent) -> bool:
        """Return whether a member's workers will never be with those of this agent."""
        layout = agent.entered_layout
        assert layout is not None
        for node, start in zip(layout.nodes, layout.starts, strict=True):
            number = self.names.index(node)
            other = self.book.agent(world.agents[number])
            if world.modes[number] == GONE or other.start != start:
                return True
            if other.entered > agent.entered or other.standing.generation > agent.entered:
                return True
            has_left = other.is_broken or other.entered_layout != layout
            if other.entered == agent.entered and has_left:
                return True
        return False

    def _ask_folder(self, world: World, number: int) -> Iterator[Move]:
        """Have the disk answer, which does what a process has asked of it that is gone since."""
        if not world.questions[number] or world.modes[number] == PAUSED:
            return
        draft, agent = Draft(self.book, world), self.book.agent(world.agents[number])
        draft.questions[number] = world.questions[number][1:]
        start, question = self.book.question(world.questions[number][0])
        found, records = self.book.folder(world.folder)
        answer = None
        if isinstance(question, Found):
            record = founding.judge(found, run="run", newcomers=question.agents, unchanged_s=0.0)
            is_refused = isinstance(record, str)
            answer = Judged(record=None) if is_refused else Judged(record=record)
            found = found if is_refused else record
        elif isinstance(question, Claim):
            layout = dict(records).setdefault(question.generation, question.layout)
            records = tuple(sorted({*records, (question.generation, layout)}, key=str))
            answer = Claimed(generation=question.generation, layout=layout)
        elif found is not None and question.number in (-1, found.number):
            found = replace(found, agents=question.agents, generation=question.generation)
        draft.folder = self.book.enter_folder(Folder(found, records))
        if answer is not None and world.modes[number] == UP and agent.start == start:
            draft.take(number, "answer", answer)
        yield draft.end(f"folder answers {self.names[number]}")

    def find_groups(self, world: World) -> list[tuple[int, Layout, list[int]]]:
        """Return the generations all of whose workers are in them."""
        found: dict[tuple[int, Layout], list[int]] = {}
        for number, agent in enumerate(map(self.book.agent, world.agents)):
            layout = agent.entered_layout
            if world.modes[number] != GONE and not agent.is_broken and layout is not None:
                found.setdefault((agent.entered, layout), []).append(number)
        return [
            (generation, layout, members)
            for (generation, layout), members in found.items()
            if len(members) == len(layout.nodes)
        ]

    def _commit(self, world: World) -> Iterator[Move]:
        for generation, layout, members in self.find_groups(world):
            number = self.book.enter_layout(layout)
            if world.committed[:2] != (generation, number):
                draft = Draft(self.book, world)
                draft.commit(generation, number, members)
                yield draft.end(f"workers commit {generation}")

    def _lose_messages(self, world: World) -> Iterator[Move]:
        """Have a connection's end overtake what was said before it."""
        for way, queue in enumerate(world.queues):
            if END in queue[1:]:
                draft = Draft(self.book, world)
                draft.queues[way] = queue[queue.index(END, 1) :]
                one, other = (self.names[each] for each in divmod(way, self.num_agents))
                yield draft.end(f"network forgets what {one} said to {other}")

    def _get_better(self, world: World) -> Iterator[Move]:
        for number, name in enumerate(self.names):
            draft = Draft(self.book, world)
            if world.modes[number] == PAUSED:
                draft.modes[number] = UP
                yield draft.end(f"{name} resumes", REPAIR)
            elif world.modes[number] == GONE:
                start = int(self.book.agent(world.agents[number]).start.partition("#")[2])
                draft.agents[number] = self.book.enter(name, start + 1)
                draft.modes[number] = UP
                yield draft.end(f"{name} returns", REPAIR)
        if world.cuts:
            draft = Draft(self.book, world)
            draft.cuts = frozenset()
            yield draft.end("network heals", REPAIR)

    def _get_worse(self, world: World) -> Iterator[Move]:
        left = world.left
        for number, name in enumerate(self.names):
            if left.losses and world.modes[number] != GONE:
                draft = Draft(self.book, world)
                draft.left = left._replace(losses=left.losses - 1)
                draft.kill(number)
                yield draft.end(f"{name} is lost", TROUBLE)
            if left.pauses and world.modes[number] == UP:
                draft = Draft(self.book, world)
                draft.left = left._replace(pauses=left.pauses - 1)
                draft.modes[number] = PAUSED
                yield draft.end(f"{name} pauses", TROUBLE)
        if left.cuts:
            yield from self._cut(world)
        if left.resets:
            yield from self._reset(world)

    def _cut(self, world: World) -> Iterator[Move]:
        numbers = range(self.num_agents)
        for size in range(1, self.num_agents // 2 + 1):
            for some in combinations(numbers, size):
                if 2 * size == self.num_agents and 0 not in some:
                    continue
                draft = Draft(self.book, world)
                others = [each for each in numbers if each not in some]
                pairs = {(min(a, b), max(a, b)) for a in some for b in others}
                draft.cuts = world.cuts | pairs
                draft.left = world.left._replace(cuts=world.left.cuts - 1)
                if draft.cuts != world.cuts:
                    names = ",".join(self.names[each] for each in some)
                    yield draft.end(f"network cuts {names} off", TROUBLE)

    def _reset(self, world: World) -> Iterator[Move]:
        for number, agent in enumerate(map(self.book.agent, world.agents)):
            if not agent.link or world.modes[number] == GONE:
                continue
            draft, leader = Draft(self.book, world), self.names.index(agent.link)
            draft.left = world.left._replace(resets=world.left.resets - 1)
            if world.modes[leader] == GONE or END in world.queues[draft.way(leader, number)]:
                continue
            draft.queues[draft.way(leader, number)] = (END,)
            draft.queues[draft.way(number, leader)] = (END,)
            yield draft.end(f"network resets {agent.name} and {agent.link}", TROUBLE)


_ORDER = ("follows", "hears", "answers", "commit", "looks", "leads", "breaks", "resigns")

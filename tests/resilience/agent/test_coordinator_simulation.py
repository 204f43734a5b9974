"""The coordinator over random events: agents and workers are simulated, time is too."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from resilience.agent.coordination.coordinator import decide, next_deadline_s, take_over
from resilience.agent.coordination.membership import (
    ENDED,
    RUNNING,
    Event,
    NodeJoined,
    NodeLost,
    Note,
    Options,
    Replace,
    Said,
    Send,
    State,
    Tick,
)
from resilience.comm.messages import Break, End, Failed, Finished, Join, Message, Open, Stopped
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report

OPTIONS = Options(
    num_nodes=2, num_local_ranks=2, num_standby_nodes=1, num_shards=2, is_sharded=True
)
END_S = 5_000.0
"""By then every run without further faults has ended or runs."""


@dataclass
class Node:
    """An agent and its workers; it says what a real one would, sooner or later."""

    name: str
    generation: int = -1
    rank: int = 0
    layout: Layout | None = None
    is_broken: bool = False
    is_ended: bool = False
    told: dict[int, Stopped] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.layout.index_of(self.name) if self.layout else -1

    def join(self) -> NodeJoined:
        join = Join(
            node=self.name, address=self.name, generation=self.generation, layout=self.layout
        )
        return NodeJoined(join=join)

    def hear(self, message: Message) -> list[Message]:
        if isinstance(message, End):
            self.is_ended = True
        elif isinstance(message, Open):
            self.generation, self.rank, self.layout = (
                message.generation,
                message.rank,
                message.layout,
            )
            self.is_broken = False
            known, self.told = self.told, {}
            return self._check_reports(message, known)
        elif isinstance(message, Break) and message.generation == self.generation:
            self.is_broken = True
            return [self.report(rank) for rank in self.ranks]
        return []

    @property
    def ranks(self) -> range:
        return range(self.rank, self.rank + OPTIONS.num_local_ranks)

    def _check_reports(self, opening: Open, known: dict[int, Stopped]) -> list[Message]:
        said: list[Message] = []
        for rank in self.ranks:
            report = opening.reports[rank]
            if report["phase"] != "fresh" and known[rank].report != report:
                said += self.die(rank)
        return said

    def report(self, rank: int, phase: Phase = Phase.COMPUTING) -> Stopped:
        if rank not in self.told:
            assert self.layout is not None
            report = replace(fresh_report(self.layout, rank, self.generation), phase=phase)
            self.told[rank] = Stopped(
                generation=self.generation, rank=rank, report=report.to_json()
            )
        return self.told[rank]

    def die(self, rank: int) -> list[Message]:
        self.told.pop(rank, None)
        failed = Failed(generation=self.generation, rank=rank, reason="died", text="died")
        return [failed, self.report(rank, Phase.FRESH)]


class Simulation:
    """Nodes, the coordinator and what is on its way between them; each link keeps its order."""

    def __init__(self, seed: int, options: Options = OPTIONS) -> None:
        self.options = options
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.number = 0
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, deque[Event]] = {}
        self.state = State(options=options)
        self.leader: str | None = None
        self.num_opened = 0

    def run(self, num_events: int) -> None:
        for _ in range(OPTIONS.num_nodes):
            self.add_node()
        for _ in range(num_events):
            if self.state.stage == ENDED:
                break
            self.random.choices(
                [self.deliver, self.fail, self.add_node, self.lose_node, self.tick, self.finish,
                 self.repeat, self.replace_leader],
                [60, 8, 4, 4, 10, 3, 5, 1],
            )[0]()  # fmt: skip
        self.settle()

    # ---- what may happen

    def add_node(self) -> None:
        node = Node(f"n{self.number}")
        self.number += 1
        self.nodes[node.name] = node
        self.leader = self.leader or node.name
        self.links[node.name] = deque([node.join()])

    def lose_node(self) -> None:
        if others := [name for name in self.nodes if name != self.leader]:
            name = self.random.choice(others)
            del self.nodes[name], self.links[name]
            self.take(NodeLost(node=name, is_dead=self.random.random() < 0.7))

    def replace_leader(self) -> None:
        """The coordinator's node is lost; the next one follows, all others come to it."""
        if len(self.nodes) < 2 or self.leader is None:
            return
        lost = self.leader
        del self.nodes[lost], self.links[lost]
        self.leader = next(iter(self.nodes))
        own = self.nodes[self.leader]
        others = [name for name in self.nodes if name != self.leader]
        self.state = take_over(
            self.options,
            generation=own.generation,
            layout=own.layout,
            lost=lost,
            silent=others,
            now_s=self.now_s,
        )
        for node in self.nodes.values():
            self.links[node.name] = deque([node.join()])

    def fail(self) -> None:
        members = [node for node in self.nodes.values() if node.index >= 0]
        if not members:
            return
        node = self.random.choice(members)
        rank = self.random.choice(node.ranks)
        if self.random.random() < 0.5:
            self.say(node, node.die(rank))
        elif not node.is_broken:
            failed = Failed(generation=node.generation, rank=rank, reason="exception", text="x")
            self.say(node, [failed, node.report(rank)])

    def finish(self) -> None:
        for node in self.nodes.values():
            if node.index >= 0 and not node.is_broken and self.random.random() < 0.5:
                rank = self.random.choice(node.ranks)
                self.say(node, [Finished(generation=node.generation, rank=rank, status=0)])

    def repeat(self) -> None:
        """A message comes twice."""
        if said := [
            each for link in self.links.values() for each in link if isinstance(each, Said)
        ]:
            event = self.random.choice(said)
            self.links[event.node].append(event)

    def tick(self) -> None:
        self.now_s += self.random.choice([0.1, 1.0, 5.0])
        if self.now_s >= next_deadline_s(self.state):
            self.take(Tick())

    def deliver(self) -> None:
        if full := [name for name, link in self.links.items() if link]:
            self.take(self.links[self.random.choice(full)].popleft())

    # ---- what follows

    def say(self, node: Node, messages: list[Message]) -> None:
        self.links[node.name] += [Said(node=node.name, message=each) for each in messages]

    def take(self, event: Event) -> None:
        before = self.state
        self.state, actions = decide(before, event, self.now_s)
        assert self.state.generation >= before.generation
        told = []
        for action in actions:
            if isinstance(action, Note) or action.node not in self.nodes:
                continue
            node = self.nodes[action.node]
            if isinstance(action, Replace):
                self.say(node, node.die(action.rank))
            elif isinstance(action, Send):
                if isinstance(action.message, Open):
                    told.append(action.message)
                    self.check_opening(action.node, action.message)
                self.say(node, node.hear(action.message))
        assert len({each.generation for each in told}) <= 1
        if told:
            self.num_opened += 1

    def check_opening(self, name: str, opening: Open) -> None:
        assert opening.generation == self.state.generation
        assert name in opening.layout.nodes
        assert len(set(opening.layout.nodes)) == OPTIONS.num_nodes
        assert set(opening.layout.nodes) <= set(self.state.present)
        reports = [Report.from_json(each) for each in opening.reports]
        assert [each.rank for each in reports] == list(range(4))
        assert {each.generation for each in reports} == {opening.generation - 1}
        seats = [opening.layout.seat(rank) for rank in range(4)]
        assert [each.node for each in reports] == [each.node for each in seats]
        assert [each.shard for each in reports] == [each.shard for each in seats]

    def settle(self) -> None:
        """Nothing more goes wrong: the run ends or runs before its last deadline."""
        while self.now_s < END_S:
            while any(self.links.values()):
                self.deliver()
            if self.state.stage in (ENDED, RUNNING):
                break
            self.now_s = max(self.now_s + 0.5, min(next_deadline_s(self.state), self.now_s + 10))
            self.take(Tick())
        assert self.state.stage in (ENDED, RUNNING), self.state
        if self.state.stage == RUNNING:
            members = [self.nodes[str(name)] for name in self.state.nodes]
            assert {each.generation for each in members} == {self.state.generation}
            assert not any(each.is_broken for each in members)
        else:
            assert all(self.nodes[name].is_ended for name in self.state.present)


def play(seed: int, options: Options = OPTIONS) -> int:
    simulation = Simulation(seed, options)
    try:
        simulation.run(num_events=200)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return simulation.num_opened


def test_rules_hold_over_random_events() -> None:
    opened = [play(seed) for seed in range(300)]

    assert sum(opened) > 1000, "the simulation opens too few generations to show anything"


def test_rules_hold_without_recovery() -> None:
    options = replace(OPTIONS, recovers=False, num_standby_nodes=0, restarts_max=30)

    opened = [play(seed, options) for seed in range(300)]

    assert max(opened) <= 31
    assert sum(opened) > 1000, "the simulation opens too few generations to show anything"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_rules_hold_over_many_more_random_events(block: int) -> None:
    for seed in range(1000 * (block + 1), 1000 * (block + 2)):
        play(seed)

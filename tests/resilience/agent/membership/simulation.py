"""Agents over a simulated network: the real decisions, with workers that are numbers.

A step is committed in a generation when the workers of all its nodes are in it, as the gate has it.
Workers go on while their agent stands still. Every commit is held against what came before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from resilience.agent.coordination import founding
from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.membership import (
    Claimed,
    Judged,
    Note,
    Options,
    Recorded,
    State,
)
from resilience.agent.coordination.outlook import FOLLOWING, LEADING
from resilience.agent.coordination.party import Party, make_outlook
from resilience.agent.coordination.standing import Standing
from resilience.comm.messages import (
    Break,
    End,
    Failed,
    Learn,
    Leave,
    Message,
    Open,
    Propose,
    ReplaceRank,
    Stopped,
    StopRun,
)
from resilience.elastic.policy import Policy
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report
from resilience.testing.network import Network
from tests.resilience.agent.membership.disk import Folder, Question
from tests.resilience.agent.membership.stand_ins import NoStores, describe_node

LEASE_S = 3.0
PATIENCE_S = 1e9


class BrokenPromiseError(AssertionError):
    """A promise of the run was broken."""


@dataclass
class Rank:
    """What a worker holds."""

    step: int = 0
    is_fresh: bool = True


class SimNode:
    """One process of an agent, and its node's workers."""

    def __init__(self, world: World, name: str, start: int) -> None:
        self.world, self.name, self.start = world, name, f"{name}#{start}"
        self.transport = world.network.node(name, world.tokens.get(name, ""))
        self.standing = Standing()
        self.opening: Open | None = None
        self.is_broken = True
        self.ranks: list[Rank] = [Rank() for _ in range(world.options.num_local_ranks)]
        self.told: dict[int, Stopped] = {}
        self.replaced: set[int] = set()
        """Local ranks whose process has died."""
        self.end: End | None = None
        self.is_looking = False
        self.left = -1
        """The generation that all are to leave after a step, as this node was told."""
        self.leaves_within_s: float | None = None
        """Set where the node was asked to leave the run."""
        self.party = Party(
            self,
            make_outlook(
                run="run",
                node=name,
                address=self.transport.address,
                start=self.start,
                endpoints=world.endpoints,
                lease_s=LEASE_S,
                now_s=world.network.now_s,
            ),
            transport=self.transport,
            make_stores=NoStores,
            records=self,
            note=self.note,
            clock=lambda: world.network.now_s,
            doubt=lambda doubted: None,
        )

    def note(self, note: Note, generation: int) -> None:
        self.world.notes.append((self.world.network.now_s, self.name, generation, note))

    def look(self, start: str) -> None:
        """See the folder, or not: `shares_folder` of the world says."""

    def claim(self, generation: int, layout: Layout) -> None:
        self.world.note_decision(layout)

        def answer() -> Claimed:
            winner = self.world.folder.records.setdefault(generation, layout)
            return Claimed(generation=generation, layout=winner)

        self.world.ask_folder(self, answer)

    def found(self, agents: tuple[str, ...]) -> None:
        def answer() -> Judged:
            found = self.world.folder.founding
            record = founding.judge(found, run="run", newcomers=agents, unchanged_s=0.0)
            if isinstance(record, str):
                return Judged(record=None, reason=record)
            self.world.folder.founding = record
            return Judged(record=record)

        self.world.ask_folder(self, answer)

    def read_record(self) -> None:
        """Ask how far the run has come; no run of the simulation ends."""
        if self.is_looking:
            return
        self.is_looking = True

        def answer() -> Recorded | None:
            self.is_looking = False
            record = self.world.folder.founding
            return None if record is None else Recorded(generation=record.generation)

        self.world.folder.read(self, answer, self.world.network.now_s)

    def renew(self, agents: tuple[str, ...], generation: int, **end: Any) -> None:
        def answer() -> None:
            record = self.world.folder.founding
            if record and (record.generation, record.is_over) <= (generation, False):
                known = tuple(sorted({*agents, *record.agents}))
                own = replace(record, agents=known, generation=generation, **end)
                self.world.folder.founding = own

        self.world.ask_folder(self, answer)

    # ---- the agent

    def make_state(self, lost: str, dead: frozenset[str], known: frozenset[str]) -> State:
        return take_over(
            self.world.options,
            self.standing,
            lost=lost,
            dead=dead,
            known=known,
            now_s=self.world.network.now_s,
        )

    def join(self) -> None:
        join = self.standing.join(
            node=self.name,
            address=self.transport.address,
            start=self.start,
            sees_folder=self.world.shares_folder,
        )
        self.party.tell(replace(join, leaves_within_s=self.leaves_within_s))

    @property
    def place(self) -> int:
        layout = self.standing.layout
        return -1 if layout is None else layout.place_of(self.name, self.start)

    @property
    def due_s(self) -> float:
        """Return when the agent has something to do that nobody asks it for."""
        view, state = self.party._outlook, self.party.state
        is_led = view.stage == FOLLOWING and view.link is not None
        if not is_led and not (view.stage == LEADING and view.is_settled):
            return self.world.network.now_s
        leases_s = [line.heard_s + LEASE_S for line in view.lines.values()]
        beat_s = view.beat_s if state is None else self.party._beat_s
        return min([beat_s + view.beat_every_s, *leases_s])

    def hear(self, message: Message) -> None:
        self.world.has_changed = True
        if isinstance(message, End):
            self.end = message
            self.party.close()
            self.is_broken = True
        elif isinstance(message, Propose):
            self.world.note_decision(message.layout)
            self.standing, agreement = self.standing.consider(message)
            if agreement:
                self.party.tell(agreement)
        elif isinstance(message, Learn):
            self.learn(message)
        elif isinstance(message, Open):
            self.open(message)
        elif isinstance(message, ReplaceRank):
            self.world.fail(self, message.rank % len(self.ranks))
        elif isinstance(message, Leave):
            self.left = message.generation
        elif isinstance(message, StopRun):
            # No run of the simulation ends: whoever has asked takes it back.
            self.leaves_within_s = None
            self.join()
        elif isinstance(message, Break) and message.generation == self.standing.generation:
            self.stop()

    def open(self, opening: Open) -> None:
        if opening.generation <= self.standing.generation:
            return
        self.world.layouts[opening.generation] = opening.layout
        self.check(opening)
        known, self.told = self.told, {}
        self.standing, self.opening, self.is_broken = self.standing.open(opening), opening, False
        self.party.move(opening.generation, opening.layout)
        before = opening.before or opening.layout
        place = before.index_of(self.name)
        for local_rank, rank in enumerate(self.ranks):
            if place < 0:
                rank.is_fresh, rank.step = True, 0
                continue
            number = before.ranks_of(place)[local_rank]
            report, told = opening.reports[number], known.get(number)
            if report["phase"] == Phase.FRESH.value:
                rank.is_fresh, rank.step = True, 0
            elif told is None or told.report != report:
                self.world.fail(self, local_rank)

    def check(self, opening: Open) -> None:
        """Fail for an opening that is not one of this run, or whose reports are not of its end."""
        layout, options = opening.before or opening.layout, self.world.options
        reports = [Report.from_json(each) for each in opening.reports]
        num_nodes, sizes = len(opening.layout.nodes), options.policy.sizes
        assert num_nodes in (sizes or (options.num_nodes,)) or (opening.is_passing and sizes)
        assert [each.rank for each in reports] == list(range(layout.world_size))
        assert {each.generation for each in reports} == {opening.generation - 1}
        seats = [layout.seat(each.rank) for each in reports]
        assert [each.shard for each in reports] == [each.shard for each in seats]
        if opening.before is None:
            assert [each.node for each in reports] == [each.node for each in seats]

    def learn(self, news: Learn) -> None:
        self.world.layouts[news.generation] = news.layout
        if news.generation > self.standing.generation:
            before = self.told if self.keeps_state(news.layout, news.opened) else {}
            self.standing = self.standing.learn(news)
            self.party.move(news.generation, news.layout)
            told = [self.renumber(self.standing.relabel(each)) for each in before.values()]
            self.told = {each.rank: each for each in told}
        if self.place < 0:
            self.is_broken = True
        else:
            self.stop()

    def keeps_state(self, layout: Layout, opened: int) -> bool:
        opening, place = self.opening, layout.place_of(self.name, self.start)
        if opening is None or opening.generation != opened or place < 0:
            return False
        own = opening.layout.index_of(self.name)
        return own >= 0 and opening.layout.shards_of(own) == layout.shards_of(place)

    def renumber(self, said: Stopped) -> Stopped:
        """Return it under the rank that the worker has in the newest generation."""
        layout = self.standing.layout
        assert layout is not None
        rank = layout.ranks_of(self.place)[said.rank % layout.num_local_ranks]
        report = {**said.report, "rank": rank, "replica": layout.seat(rank).replica}
        return replace(said, rank=rank, report=report)

    def leave(self) -> None:
        """Leave the generation after a step, as all others do."""
        opening = self.opening
        assert opening is not None
        self.is_broken = self.world.has_changed = True
        generation = self.standing.generation
        self.party.tell(
            Failed(generation=generation, rank=opening.rank, reason="planned", text="as asked")
        )
        if self.standing.generation == generation:
            self.stop()
        self.world.set_tick(self.name)

    def stop(self) -> None:
        """Have the workers stop, and tell what they hold."""
        self.is_broken = True
        for local_rank in range(len(self.ranks)):
            self.party.tell(self.report(local_rank))

    def report(self, local_rank: int) -> Stopped:
        layout = self.standing.layout
        assert layout is not None
        number = layout.ranks_of(self.place).start + local_rank
        if number not in self.told:
            rank, generation = self.ranks[local_rank], self.standing.generation
            report = fresh_report(layout, number, generation)
            was_there = self.keeps_state(layout, self.standing.opened)
            if not rank.is_fresh and was_there:
                report = replace(
                    report, phase=Phase.COMPUTING, step=rank.step, member_generation=generation
                )
            self.told[number] = Stopped(
                generation=generation,
                rank=number,
                report=report.to_json(),
                is_replaced=local_rank in self.replaced,
            )
        return self.told[number]


def find_start(opening: Open) -> int:
    """Return how many steps the ranks of a generation begin with."""
    layout = opening.layout
    before = opening.before or layout
    reports = [Report.from_json(each) for each in opening.reports]
    names = {name for name in layout.nodes if _is_same(name, before, layout)}
    held = [
        each
        for each in reports
        if each.phase is not Phase.FRESH and before.seat(each.rank).node in names
    ]
    shards = {layout.seat(rank).shard for rank in range(layout.world_size)}
    start = max((each.step for each in held), default=0)
    return start if {each.shard for each in held if each.step == start} == shards else 0


def _is_same(name: str, before: Layout, after: Layout) -> bool:
    """Return whether it is the same start of an agent that is a member of both."""
    place = after.index_of(name)
    return before.place_of(name, after.starts[place]) >= 0


class World:
    """All that there is, and what was committed."""

    def __init__(
        self,
        seed: int,
        *,
        num_nodes: int,
        num_standby: int,
        num_shards: int = 1,
        shares_folder: bool = True,
        sizes: tuple[int, ...] = (),
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.seed = seed
        self.tokens = tokens or {}
        self.random = random.Random(seed)
        self.network = Network(seed, lease_s=LEASE_S)
        self.options = Options(
            num_nodes=num_nodes,
            num_standby_nodes=num_standby,
            num_local_ranks=2,
            num_shards=num_shards,
            is_sharded=num_shards > 1,
            last_call_s=5.0,
            join_deadline_s=PATIENCE_S,
            partition_patience_s=PATIENCE_S,
            restarts_max=10**9,
            restarts_without_progress_max=10**9,
            policy=Policy(sizes=sizes, hold_s=1.0, snooze_s=2.0),
        )
        self.shares_folder = shares_folder
        self.names = [f"n{number}" for number in range(num_nodes + num_standby)]
        self.endpoints = tuple(f"{name}:1" for name in self.names)
        self.folder = Folder()
        self.notes: list[Any] = []
        self.nodes: dict[str, SimNode] = {}
        self.paused: set[str] = set()
        self.num_starts = 0
        self.committed: list[tuple[int, Layout, int]] = []
        """Generation and layout of each that has committed a step, and how many there are by then.
        """
        self.safe: set[tuple[str, ...]] = set()
        """Members of generations that were decided on while these held everything."""
        self.layouts: dict[int, Layout] = {}
        """Of each generation that anybody has heard of."""
        self.next_tick_s: dict[str, float] = {}
        self.has_changed = True
        """Whether other workers than before may be in a generation together."""
        self.together: list[tuple[Open, list[SimNode]]] = []
        """Generations all of whose workers are in them."""
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        self.num_starts += 1
        node = SimNode(self, name, self.num_starts)
        self.nodes[name] = node
        self.has_changed = True
        # Workers take a while until they are warm.
        self.next_tick_s[name] = self.network.now_s + self.random.uniform(0, 0.1)

    # ---- time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.network.now_s + seconds
        while self.network.now_s < until_s:
            awake = [name for name in self.nodes if name not in self.paused]
            ticks = min((self.next_tick_s[name] for name in awake), default=until_s)
            records = min((due_s for due_s, *_ in self.folder.waiting), default=until_s)
            now_s = max(self.network.now_s, min(until_s, ticks, records, self.network.next_s()))
            self.network.advance(now_s)
            for name in self.network.ready():
                self.nodes[name].party.serve()
                self.set_tick(name)
            for name in awake:
                if self.next_tick_s[name] <= now_s:
                    self.nodes[name].party.tick()
                    self.next_tick_s[name] = math.inf
                    self.set_tick(name)
            self.folder.answer(now_s, self.paused, self.nodes)
            self.step()
            self.let_go()

    def let_go(self) -> None:
        """End the agents that were asked to leave and have no place any more."""
        for name, node in list(self.nodes.items()):
            is_asked = node.leaves_within_s is not None and name not in self.paused
            if is_asked and node.place < 0 and node.standing.generation >= 0:
                node.party.leave("asked to leave")
                self.kill(name)

    def set_tick(self, name: str) -> None:
        """Have an agent look around when something is due, and not much later."""
        now_s = self.network.now_s
        at_s = self.random.uniform(0.05, 0.3) + max(now_s, self.nodes[name].due_s)
        self.next_tick_s[name] = min(self.next_tick_s[name], at_s)

    def ask_folder(self, node: SimNode, question: Question) -> None:
        self.folder.ask(node, question, self.network.now_s + self.random.uniform(0, 1))

    # ---- workers

    def step(self) -> None:
        """Commit a step in each generation whose workers are all in it."""
        if self.has_changed:
            self.has_changed, self.together = False, self.find_together()
        for opening, members in self.together:
            self.commit(opening, members)

    def find_together(self) -> list[tuple[Open, list[SimNode]]]:
        seen: dict[tuple[int, Layout], list[SimNode]] = {}
        for node in self.nodes.values():
            if not node.is_broken and node.opening is not None:
                key = (node.opening.generation, node.opening.layout)
                seen.setdefault(key, []).append(node)
        found: list[tuple[Open, list[SimNode]]] = []
        for (_, layout), nodes in sorted(seen.items(), key=lambda each: each[0][0]):
            opening = nodes[0].opening
            if opening and sorted(node.name for node in nodes) == sorted(layout.nodes):
                found.append((opening, nodes))
        return found

    def commit(self, opening: Open, members: list[SimNode]) -> None:
        generation = opening.generation
        last = self.committed[-1] if self.committed else None
        if opening.is_passing:
            self.pass_through(opening, members)
            return
        if last is None or last[0] < generation:
            step = find_start(opening)
            if last is not None and step < last[2]:
                self.check_loss(last, step, generation)
            self.committed.append((generation, opening.layout, step))
        elif last[0] > generation or last[1] != opening.layout:
            raise BrokenPromiseError(
                f"step committed in generation {generation} after one in {last[0]}"
            )
        step = self.committed[-1][2] + 1
        for node in members:
            for rank in node.ranks:
                rank.step, rank.is_fresh = step, False
        self.committed[-1] = (generation, opening.layout, step)
        if any(node.left == generation for node in members):
            for node in members:
                node.leave()

    def pass_through(self, opening: Open, members: list[SimNode]) -> None:
        """Bring all workers to one state in a generation that commits nothing."""
        step = find_start(opening)
        if self.committed and step < self.committed[-1][2]:
            self.check_loss(self.committed[-1], step, opening.generation)
        for node in members:
            for rank in node.ranks:
                rank.step, rank.is_fresh = step, False
        for node in members:
            node.leave()

    def note_decision(self, layout: Layout) -> None:
        """Note who was given up while others held all that there was."""
        if self.committed and self.held(layout.nodes) == self.shards:
            self.safe.add(layout.nodes)

    def held(self, names: Sequence[str]) -> set[str]:
        """Return the shards of the last step that the workers of these nodes hold."""
        _, layout, step = self.committed[-1]
        found: set[str] = set()
        for name in set(names) & self.nodes.keys() & set(layout.nodes):
            numbers = layout.ranks_of(layout.index_of(name))
            for rank, number in zip(self.nodes[name].ranks, numbers, strict=True):
                if not rank.is_fresh and rank.step >= step:
                    found.add(layout.seat(number).shard)
        return found

    @property
    def shards(self) -> set[str]:
        layout = self.committed[-1][1]
        return {layout.seat(rank).shard for rank in range(layout.world_size)}

    def check_loss(self, last: tuple[int, Layout, int], start: int, generation: int) -> None:
        """Fail where committed steps were lost although a copy of each shard lived on."""
        number, layout, step = last
        since = [each.nodes for g, each in self.layouts.items() if number < g <= generation]
        if any(nodes in self.safe for nodes in since):
            # Decided while others held everything, and lost since.
            return
        before = [nodes for nodes in since if nodes != self.layouts[generation].nodes]
        names = [name for name in layout.nodes if all(name in nodes for nodes in before)]
        if self.held(names) == self.shards:
            raise BrokenPromiseError(
                f"generation {generation} begins at {start}, {step} was committed"
            )

    def fail(self, node: SimNode, local_rank: int) -> None:
        """A worker dies; its agent replaces it."""
        node.ranks[local_rank] = Rank()
        node.replaced.add(local_rank)
        # No gate is passed without it.
        node.is_broken = self.has_changed = True
        if node.place < 0:
            return
        layout = node.standing.layout
        assert layout is not None
        number = layout.ranks_of(node.place).start + local_rank
        node.told.pop(number, None)
        generation = node.standing.generation
        node.party.tell(
            Failed(generation=generation, rank=number, reason="died", text="a worker died")
        )
        if node.standing.generation == generation:
            node.party.tell(node.report(local_rank))
        self.set_tick(node.name)

    # ---- troubles

    def ask(self, name: str, within_s: float) -> None:
        """Ask a node to leave the run; it takes that back where the run goes nowhere without it."""
        node = self.nodes[name]
        node.leaves_within_s = within_s
        if name not in self.paused:
            node.join()
            self.set_tick(name)

    def kill(self, name: str) -> None:
        self.paused.discard(name)
        self.network.kill(name)
        self.has_changed = True
        del self.nodes[name]

    def pause(self, name: str) -> None:
        if name not in self.paused:
            self.paused.add(name)
            self.network.pause(name)

    def resume(self, name: str) -> None:
        if name in self.paused:
            self.paused.discard(name)
            self.network.resume(name)
            self.next_tick_s[name] = self.network.now_s

    @property
    def steps(self) -> int:
        return self.committed[-1][2] if self.committed else 0

    @property
    def generation(self) -> int:
        return self.committed[-1][0] if self.committed else -1

    def describe(self) -> str:
        lines = [f"seed {self.seed} at {self.network.now_s:.2f}, committed {self.committed[-1:]}"]
        for name, node in self.nodes.items():
            is_paused = name in self.paused
            lines.append(describe_node(name, node.party, node.standing, is_paused=is_paused))
        return "\n".join(lines)

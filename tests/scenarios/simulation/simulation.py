"""Agents over a simulated network: the real decisions, with workers that are numbers.

A step is committed in a generation when the workers of all its nodes are in it, as the gate has it.
Workers go on while their agent stands still. Every commit is held against what came before it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from resilience.agent.coordination.membership import Options
from resilience.comm.messages import (
    Failed,
    Open,
)
from resilience.elastic.policy import Policy
from resilience.state.layout import Layout
from resilience.testing.network import Network
from tests.scenarios.simulation.disk import Folder, Question
from tests.scenarios.simulation.sim_node import LEASE_S, Rank, SimNode, find_start
from tests.scenarios.simulation.stand_ins import describe_node

PATIENCE_S = 1e9


class BrokenPromiseError(AssertionError):
    """A promise of the run was broken."""


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
        self.grain_s = 0.0
        """What happens within so many seconds happens at once; 0: nothing does."""
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
            next_s = min(until_s, ticks, records, self.network.next_s())
            if self.grain_s:
                next_s = min(until_s, math.ceil(next_s / self.grain_s) * self.grain_s)
            now_s = max(self.network.now_s, next_s)
            self.network.advance(now_s)
            for name in self.network.ready():
                self.nodes[name].member.serve()
                self.set_tick(name)
            for name in awake:
                if self.next_tick_s[name] <= now_s:
                    self.nodes[name].member.tick()
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
                node.member.leave("asked to leave")
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
        node.member.tell(
            Failed(generation=generation, rank=number, reason="died", text="a worker died")
        )
        if node.standing.generation == generation:
            node.member.tell(node.report(local_rank))
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
            lines.append(describe_node(name, node.member, node.standing, is_paused=is_paused))
        return "\n".join(lines)

"""A node of the simulation: the real decisions of an agent, with workers that are numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from resilience.agent.coordination import founding
from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.events import Claimed, Ended, Judged, Note, Recorded
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.node import MembershipNode
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.view import MembershipView, Role, find_endpoint_order
from resilience.comm.messages import (
    Break,
    End,
    Failed,
    Hello,
    Learn,
    Leave,
    Message,
    Open,
    Propose,
    ReplaceRank,
    Stopped,
    StopRun,
    StoreReply,
)
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report

LEASE_S = 3.0


@dataclass
class Rank:
    """What a worker holds."""

    step: int = 0
    is_fresh: bool = True


class SimNode:
    """One process of an agent, and its node's workers."""

    def __init__(self, world: Any, name: str, start: int) -> None:
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
        self.planned: Failed | None = None
        """What it has said since of having left its generation so."""
        self.leaves_within_s: float | None = None
        """Set where the node was asked to leave the run."""
        self.member = MembershipNode(
            self,
            MembershipView(
                hello=Hello(
                    run="run",
                    node=name,
                    address=self.transport.address,
                    start=self.start,
                    order=find_endpoint_order(self.transport.address, world.endpoints),
                ),
                endpoints=world.endpoints,
                lease_s=LEASE_S,
                tick_s=world.network.now_s,
            ),
            transport=self.transport,
            records=self,
            note=self.note,
            clock=lambda: world.network.now_s,
            doubt=lambda doubted: None,
        )

    def note(self, note: Note, generation: int) -> None:
        self.world.notes.append((self.world.network.now_s, self.name, generation, note))

    def reply(self, reply: StoreReply) -> None:
        """Pass nothing on: workers are numbers here."""

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

    def read_record(self, after: Ended) -> None:
        """Ask how far the run has come; no run of the simulation ends."""
        if self.is_looking:
            return
        self.is_looking = True

        def answer() -> Recorded | None:
            self.is_looking = False
            record = self.world.folder.founding
            return None if record is None else Recorded.read(record, after)

        self.world.folder.read(self, answer, self.world.network.now_s)

    def renew(self, state: State, *, is_over: bool) -> None:
        def answer() -> None:
            record = self.world.folder.founding
            if record and (record.generation, record.is_over) <= (state.generation, False):
                own = founding.note_agents(
                    record, state.known, state.starts, here=state.present, gone=state.gone
                )
                self.world.folder.founding = replace(
                    own, generation=state.generation, is_over=is_over
                )

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
        self.member.tell(replace(join, leaves_within_s=self.leaves_within_s))

    @property
    def place(self) -> int:
        layout = self.standing.layout
        return -1 if layout is None else layout.place_of(self.name, self.start)

    @property
    def due_s(self) -> float:
        """Return when the agent has something to do that nobody asks it for."""
        view, state = self.member._view, self.member.state
        is_led = view.role == Role.FOLLOWING and view.link is not None
        if not is_led and not (view.role == Role.LEADING and view.is_settled):
            return self.world.network.now_s
        leases_s = [line.heard_s + LEASE_S for line in view.lines.values()]
        beat_s = view.beat_s if state is None else self.member._beat_s
        return min([beat_s + view.beat_every_s, *leases_s])

    def obey(self, message: Message) -> None:
        self.world.has_changed = True
        if isinstance(message, End):
            self.end = message
            self.member.close()
            self.is_broken = True
        elif isinstance(message, Propose):
            self.world.note_decision(message.layout)
            self.standing, agreement = self.standing.consider(message)
            if agreement:
                self.member.tell(agreement)
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
        reports = opening.read_reports()
        self.check(opening, reports)
        known, self.told, self.planned = self.told, {}, None
        self.standing, self.opening, self.is_broken = self.standing.open(opening), opening, False
        self.member.move(opening.generation, opening.layout)
        before = opening.before or opening.layout
        place = before.index_of(self.name)
        has_other_shards = place >= 0 and before.shards_of(place) != opening.layout.shards_of(
            self.place
        )
        for local_rank, rank in enumerate(self.ranks):
            if place < 0:
                rank.is_fresh, rank.step = True, 0
                continue
            number = before.ranks_of(place)[local_rank]
            report, told = reports[number], known.get(number)
            if report.phase is Phase.FRESH:
                rank.is_fresh, rank.step = True, 0
            elif has_other_shards or told is None or told.report != report.to_json():
                # A process whose shard is another one ends.
                self.world.fail(self, local_rank)

    def check(self, opening: Open, reports: Sequence[Report]) -> None:
        """Fail for an opening that is not one of this run, or whose reports are not of its end."""
        layout, options = opening.before or opening.layout, self.world.options
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
        if news.generation <= self.standing.generation:
            return
        before = self.told if self.keeps_state(news.layout, news.opened) else {}
        self.standing = self.standing.learn(news)
        self.member.move(news.generation, news.layout)
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
        self.planned = Failed(
            generation=generation,
            rank=opening.layout.ranks_of(self.place).start,
            reason="planned",
            text="as asked",
        )
        self.member.tell(self.planned)
        if self.standing.generation == generation:
            self.stop()
        self.world.set_tick(self.name)

    def stop(self) -> None:
        """Have the workers stop, and tell what they hold."""
        self.is_broken = True
        layout = self.standing.layout
        if self.planned is not None and layout is not None:
            left = self.standing.relabel(self.planned)
            self.member.tell(replace(left, rank=layout.ranks_of(self.place).start))
        for local_rank in range(len(self.ranks)):
            self.member.tell(self.report(local_rank))

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
    reports = opening.read_reports()
    names = {name for name in layout.nodes if _keeps_shards(name, before, layout)}
    held = [
        each
        for each in reports
        if each.phase is not Phase.FRESH and before.seat(each.rank).node in names
    ]
    start = max((each.step for each in held), default=0)
    return start if {each.shard for each in held if each.step == start} == set(layout.shards) else 0


def _keeps_shards(name: str, before: Layout, after: Layout) -> bool:
    """Return whether the same start of an agent is a member of both, with the same shards."""
    place = after.index_of(name)
    old = before.place_of(name, after.starts[place])
    return old >= 0 and before.shards_of(old) == after.shards_of(place)

"""What an agent of the model does about one thing that happens, by the rules of the product.

Coordinator, votes, opening, standing and founding are the product's own pure functions, and so is
what the end of a connection means. What `MembershipNode` does with
their decisions is done here alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from resilience.agent.connections.transport import Gone
from resilience.agent.coordination import coordinator, succession
from resilience.agent.coordination.events import (
    Claimed,
    ClaimRecord,
    Event,
    FoundRun,
    Judged,
    NodeJoined,
    NodeLost,
    Said,
    Send,
    Tick,
)
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.view import Line, MembershipView, Role
from resilience.agent.coordination.votes import next_ballot
from resilience.comm.messages import (
    Ballot,
    Beat,
    Break,
    Failed,
    Join,
    Learn,
    Message,
    Open,
    Propose,
)
from resilience.state.layout import Layout
from resilience.state.report import Phase
from tests.resilience.agent.coordination.decisions import find_unread
from tests.scenarios.simulation.model_agent import (
    LAST_CALL_S,
    LEASE_S,
    NOWHERE,
    PATIENCE_S,
    Agent,
    Claim,
    Found,
    Renew,
    count_steps,
    find_begin,
    without_past,
    without_trace,
)

EVERYONE = ""
"""To whom something is said that all who are connected hear."""


class Outcome(NamedTuple):
    """What an agent is, and does, after one thing has happened."""

    agent: Agent
    said: tuple[tuple[str, Message, frozenset[str]], ...] = ()
    """To whom, and whom the speaker knew of as present before."""
    asked: tuple[Claim | Found | Renew, ...] = ()
    decided: tuple[tuple[Layout, int], ...] = ()
    """Members of a next generation that were decided on here, and how many steps they hold."""
    chosen: tuple[tuple[int, Layout, int], ...] = ()
    """Generations that have come about by this, and how many steps each begins with."""


class Turn:
    """Does what one event makes an agent do."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._said: list[tuple[str, Message, frozenset[str]]] = []
        self._asked: list[Claim | Found | Renew] = []
        self._decided: list[tuple[Layout, int]] = []
        self._chosen: list[tuple[int, Layout, int]] = []
        self._inbox: deque[Event] = deque()

    def end(self) -> Outcome:
        return Outcome(
            without_trace(self._agent),
            tuple(self._said),
            tuple(self._asked),
            tuple(self._decided),
            tuple(self._chosen),
        )

    def _change(self, **fields: object) -> None:
        self._agent = replace(self._agent, **fields)  # type: ignore[arg-type]

    # ---- whom it follows

    def lead(self) -> Outcome:
        agent = self._agent
        state = coordinator.take_over(
            agent.options,
            agent.standing,
            lost=agent.lost,
            dead=agent.gone,
            known=agent.roster,
            now_s=0.0,
        )
        ballot = next_ballot(agent.ballot, agent.start)
        self._change(state=replace(state, ballot=ballot), ballot=ballot, lost="")
        return self.coordinate(NodeJoined(join=self._agent.join))

    def follow(self, leader: str, ballot: Ballot) -> Outcome:
        self._change(link=leader, lost="", ballot=max(self._agent.ballot, ballot))
        self._said.append((leader, self._agent.join, frozenset()))
        return self.end()

    def resign(self) -> Outcome:
        self._change(state=None)
        return self.end()

    def lose_leader(self) -> Outcome:
        """Take in that the coordinator is silent."""
        self._change(link="", lost=self._agent.link)
        return self.end()

    def see_leader_end(self) -> Outcome:
        """Take in that the connection to the coordinator has ended, as the product does."""
        view = self._look_at(Line(heard_s=0.0, address=self._agent.link), Role.FOLLOWING)
        view, _ = succession.decide(view, Gone(peer=1, reason=""), 0.0)
        self._change(gone=self._agent.gone | view.dead)
        return self.lose_leader()

    def lose_follower(self, node: str) -> Outcome:
        """Take in that a follower is silent."""
        return self.coordinate(NodeLost(node=node, is_dead=False))

    def see_follower_end(self, node: str) -> Outcome:
        """Take in that the connection to a follower has ended, as the product does."""
        state = self._agent.state
        assert state is not None
        view = self._look_at(Line(heard_s=0.0, join=state.present[node]), Role.LEADING)
        _, acts = succession.decide(view, Gone(peer=1, reason=""), 0.0)
        (lost,) = [act for act in acts if isinstance(act, NodeLost)]
        return self.coordinate(lost)

    def _look_at(self, line: Line, role: Role) -> MembershipView:
        """Return a view with one connection, by which the product says what its end means."""
        return MembershipView(
            hello=replace(self._agent.hello, leader=self._agent.link or self._agent.name),
            endpoints=(),
            lease_s=LEASE_S,
            role=role,
            lines={1: line},
            link=1 if role == Role.FOLLOWING else None,
            roster=((self._agent.link, self._agent.link),),
            is_settled=True,
            tick_s=0.0,
        )

    # ---- coordinator

    def hear_follower(self, node: str, message: Message) -> Outcome:
        state = self._agent.state
        assert state is not None
        if not isinstance(message, Join):
            return self.coordinate(Said(node=node, message=message))
        if node in state.present and state.present[node].start != message.start:
            # The end of the connection of the one before is still on its way.
            self._inbox.append(NodeLost(node=node, is_dead=False))
        return self.coordinate(NodeJoined(join=message))

    def tick(self) -> Outcome:
        """Look around after the lease, and the last call, have ended."""
        return self.coordinate(Tick(), LAST_CALL_S)

    def lose_patience(self) -> Outcome:
        """Look around when the last holder of a shard has been waited for long enough."""
        return self.coordinate(Tick(), PATIENCE_S)

    def answer(self, answer: Claimed | Judged) -> Outcome:
        if isinstance(answer, Judged) and answer.record:
            self._change(number=answer.record.number)
        return self.coordinate(answer) if self._agent.state else self.end()

    def coordinate(self, event: Event, now_s: float = 0.0) -> Outcome:
        self._inbox.append(event)
        return self._take_in(now_s)

    def _take_in(self, now_s: float = 0.0) -> Outcome:
        while self._inbox:
            self._decide(self._inbox.popleft(), now_s)
        return self.end()

    def _decide(self, event: Event, now_s: float) -> None:
        before = self._agent.state
        assert before is not None
        state, actions = coordinator.decide(before, event, now_s)
        self._change(state=without_past(state))
        if record := find_unread(state):
            self._inbox.append(record)
        if state.opened >= 0 and (state.opened, state.known) != (before.opened, before.known):
            known = tuple(sorted(state.known))
            self._asked.append(Renew(self._agent.number, known, state.generation))
        for action in actions:
            if isinstance(action, ClaimRecord):
                self._decide_on(state, action.layout)
                self._asked.append(Claim(action.generation, action.layout))
            elif isinstance(action, FoundRun):
                self._asked.append(Found(action.agents))
            elif isinstance(action, Send):
                if isinstance(action.message, Propose):
                    self._decide_on(state, action.message.layout)
                self._send(action, frozenset(before.present))
        if state.ballot != before.ballot:
            self._change(ballot=state.ballot)
            self._said.append((EVERYONE, Beat(ballot=state.ballot), frozenset(before.present)))
            self._tell(self._agent.join)
        else:
            self._send_roster(before, state)

    def _send_roster(self, before: State, state: State) -> None:
        """Tell newcomers a ballot that they have not heard of; all others have been told."""
        for node in sorted(state.present.keys() - before.present.keys()):
            if node != self._agent.name and state.present[node].promised < state.ballot:
                roster = frozenset(before.present)
                self._said.append((node, Beat(ballot=state.ballot), roster))

    def _decide_on(self, state: State, layout: Layout) -> None:
        self._decided.append((layout, count_steps(layout, list(state.reports.values()))))

    def _send(self, action: Send, roster: frozenset[str]) -> None:
        message = action.message
        if isinstance(message, Open):
            begin = find_begin(message)
            self._chosen.append((message.generation, message.layout, begin))
        elif isinstance(message, Learn):
            self._chosen.append((message.generation, message.layout, NOWHERE))
        if action.node == self._agent.name:
            self._hear(message)
        else:
            self._said.append((action.node, message, roster))

    # ---- a member, or a standby

    def hear_leader(self, message: Message, roster: frozenset[str]) -> Outcome:
        known = self._agent.roster | roster | {self._agent.link, self._agent.name}
        self._change(roster=known, gone=frozenset())
        if isinstance(message, Beat):
            if message.ballot > self._agent.ballot:
                self._change(ballot=message.ballot)
                self._tell(self._agent.join)
        elif not isinstance(message, Propose) or message.ballot == self._agent.ballot:
            self._hear(message)
        return self.end()

    def _tell(self, message: Message) -> None:
        agent = self._agent
        if agent.state is not None and isinstance(message, Join):
            self._inbox.append(NodeJoined(join=message))
        elif agent.state is not None:
            self._inbox.append(Said(node=agent.name, message=message))
        elif agent.link:
            self._said.append((agent.link, message, frozenset()))

    def _hear(self, message: Message) -> None:
        agent = self._agent
        if isinstance(message, Propose):
            standing, agreement = agent.standing.consider(message)
            self._change(standing=standing)
            if agreement:
                self._tell(agreement)
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Learn) and message.generation > agent.standing.generation:
            self._change(standing=agent.standing.learn(message), is_broken=True)
            if self._agent.place >= 0:
                self._tell(self._agent.report())
        elif isinstance(message, Break) and message.generation == agent.standing.generation:
            self._stop()

    def _stop(self) -> None:
        self._change(is_broken=True)
        self._tell(self._agent.report())

    def _open(self, opening: Open) -> None:
        agent = self._agent
        if opening.generation <= agent.standing.generation:
            return
        layout = opening.layout
        own = opening.read_reports()[layout.ranks_of(layout.index_of(agent.name)).start]
        is_fresh = own.phase is Phase.FRESH
        assert is_fresh or own.to_json() == agent.report().report, "it has said something else"
        self._change(
            standing=agent.standing.open(opening),
            entered=opening.generation,
            entered_layout=opening.layout,
            begun=find_begin(opening),
            is_broken=False,
            step=-1 if is_fresh else agent.step,
        )

    def commit(self) -> Outcome:
        """Have its workers commit a step, which they do also while the agent stands still."""
        self._change(step=self._agent.begun + 1)
        return self.end()

    def break_group(self) -> Outcome:
        """Have its workers find that another one is gone."""
        agent = self._agent
        self._change(is_broken=True)
        failed = Failed(generation=agent.entered, rank=agent.place, reason="group", text="")
        self._tell(failed)
        self._tell(self._agent.report())
        return self._take_in()

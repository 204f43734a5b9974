"""One agent of the model: what it does about one thing that happens, by the rules of the product.

Coordinator, votes, opening, standing and founding are the product's own pure functions, and so is
what the end of a connection means. Workers are numbers: how many steps they have committed. Whom an
agent follows is not decided here: `model` lets it follow, and lead, wherever it could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from resilience.agent.coordination import coordinator
from resilience.agent.coordination.events import Tick
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.view import NO_ORDER
from resilience.comm.messages import NO_BALLOT, Ballot, Hello, Join, Open, Stopped
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report

LEASE_S, LAST_CALL_S, PATIENCE_S, NEVER_S = 3.0, 5.0, 600.0, 1e9
NOWHERE = 1 << 30
"""The first step of a generation that does not begin."""
EVER_S = 1e12
"""By then every deadline is over."""


_NOTHING = Standing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One process of an agent, and its node's workers."""

    name: str
    start: str
    options: Options
    shares_folder: bool
    standing: Standing = _NOTHING
    entered: int = -1
    """The generation in which its workers were last."""
    entered_layout: Layout | None = None
    begun: int = 0
    """How many steps were committed when that began."""
    is_broken: bool = True
    step: int = -1
    """How many steps its workers' state has seen; -1 for none that counts."""
    link: str = ""
    """Whom it follows."""
    ballot: Ballot = NO_BALLOT
    """The newest that it takes part in."""
    lost: str = ""
    gone: frozenset[str] = frozenset()
    """Coordinators that have ended for certain, as far as the agent knows."""
    roster: frozenset[str] = frozenset()
    number: int = -1
    """Of the record under which it has begun the run."""
    state: State | None = None
    """What it coordinates."""

    @property
    def place(self) -> int:
        layout = self.standing.layout
        return -1 if layout is None else layout.place_of(self.name, self.start)

    @property
    def join(self) -> Join:
        join = self.standing.join(
            node=self.name, address=self.name, start=self.start, sees_folder=self.shares_folder
        )
        return replace(join, promised=self.ballot)

    @property
    def hello(self) -> Hello:
        """Return what it says when it leads."""
        order = self.place if self.place >= 0 else NO_ORDER
        generation = self.standing.generation
        return Hello(
            run="run", node=self.name, address=self.name, generation=generation, order=order
        )

    def report(self) -> Stopped:
        """Return what its rank holds at the end of the newest generation."""
        layout, generation = self.standing.layout, self.standing.generation
        assert layout is not None
        report = fresh_report(layout, self.place, generation)
        was_there = (
            self.entered_layout is not None
            and self.entered == self.standing.opened
            and self.entered_layout.index_of(self.name) == self.place
        )
        if self.step >= 0 and was_there:
            report = replace(
                report, phase=Phase.COMPUTING, step=self.step, member_generation=generation
            )
        return Stopped(
            generation=generation,
            rank=self.place,
            report=report.to_json(),
            is_replaced=not was_there,
        )

    def key(self) -> tuple[object, ...]:
        """Return what tells it from others."""
        parts = (
            self.name, self.start, self.standing, self.entered, self.entered_layout, self.begun,
            self.is_broken, self.step, self.link, self.ballot, self.lost, self.gone, self.roster,
            self.number,
        )  # fmt: skip
        return (*parts, None if self.state is None else _state_key(self.state))


class Claim(NamedTuple):
    """A question to the folder: whose the next generation is."""

    generation: int
    layout: Layout


class Found(NamedTuple):
    """Whether these may begin the run."""

    agents: tuple[str, ...]


class Renew(NamedTuple):
    """Who belongs to the run."""

    number: int
    agents: tuple[str, ...]
    generation: int


def ends_at_last(agent: Agent) -> bool:
    """Return whether a coordinator that waits has a deadline, and ends the run by it.

    The folder may be asked at the deadline, and then has its own time.
    """
    assert agent.state is not None
    state, _ = coordinator.decide(agent.state, Tick(), EVER_S)
    state, _ = coordinator.decide(state, Tick(), 2 * EVER_S)
    due_s = coordinator.next_deadline_s(agent.state, 0.0)
    return due_s < EVER_S and state.stage in (Stage.RUNNING, Stage.ENDED)


def find_begin(opening: Open) -> int:
    """Return how many steps a generation begins with."""
    return count_steps(opening.layout, opening.read_reports())


def count_steps(layout: Layout, reports: list[Report]) -> int:
    """Return how many steps the ranks hold together that have told of themselves."""
    held = [each for each in reports if each.phase is not Phase.FRESH]
    shards = {layout.seat(rank).shard for rank in range(layout.world_size)}
    step = max((each.step for each in held), default=0)
    return step if {each.shard for each in held if each.step == step} == shards else 0


def without_trace(agent: Agent) -> Agent:
    """Leave out what nothing can come of any more."""
    standing = agent.standing
    if standing.proposed <= standing.generation:
        standing = replace(standing, proposed=-1, ballot=NO_BALLOT, agreed=None)
    if agent.entered < standing.opened:
        # What its workers hold is of a generation that others have gone on from.
        agent = replace(agent, entered=-1, entered_layout=None, step=-1)
    begun = 0 if agent.is_broken else agent.begun
    return replace(agent, standing=standing, begun=begun)


def without_past(state: State) -> State:
    """Leave out what only limits how often a run may be broken, and what time it is."""
    return replace(
        state,
        since_s=0.0,
        claimed_s=0.0,
        answered_s=float("-inf"),
        incidents=(),
        fruitless=(),
        in_process={},
        first_failure=None,
        last_step=-1,
        finished={},
        refusal="",
        patience_s=0.0,
        shortened_s=float("-inf"),
        starts={},
        counted=-1,
        saved=None,
        side_save=None,
    )


def _state_key(state: State) -> tuple[object, ...]:
    reports = sorted(state.reports.items(), key=_first)
    return (
        state.stage, state.generation, state.opened, state.layout, state.nodes, state.awaited,
        state.voters, state.dead, state.gone, state.known, tuple(state.present.items()),
        state.ballot, tuple(sorted(state.accepted.items(), key=_first)), state.proposal,
        state.asked, state.shares_folder, state.is_claiming, state.founding, state.first,
        state.record, state.is_stateless, state.probed if state.probed[0] == state.generation else
        None, tuple((rank, each.node, each.phase, each.step) for rank, each in reports),
    )  # fmt: skip


def _first(pair: tuple[object, object]) -> str:
    return str(pair[0])

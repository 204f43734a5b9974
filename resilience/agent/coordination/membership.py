"""What the coordinator knows, what it hears, and what it has done. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from resilience.agent.coordination.events import Action, Ended
from resilience.agent.coordination.founding import Record
from resilience.comm.messages import NO_BALLOT, Ballot, End, Failed, Finished, Join, StateSaved
from resilience.elastic.policy import Growth, Policy, Sizing
from resilience.state.layout import Layout
from resilience.state.report import Report

REPORTS_WAIT = "waits until all ranks at hand have reported what they hold"


class Stage(Enum):
    """Part of a run's life, as its coordinator sees it."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    AGREEING = "agreeing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the coordinator is told on the command line."""

    num_nodes: int
    """With which the run starts; from then on the layout says how many there are."""
    num_standby_nodes: int = 0
    num_local_ranks: int
    num_shards: int = 1
    is_sharded: bool = False
    num_stages: int = 1
    """All three as a layout has them."""
    last_call_s: float = 20.0
    """How long expected standby nodes are waited for once enough nodes are there."""
    join_deadline_s: float = 120.0
    """How long nodes, replacements and the ranks of a generation may take to come."""
    stop_deadline_s: float = 15.0
    lease_s: float = 3.0
    """An agent that was not heard for so long is silent, and may live on."""
    partition_patience_s: float = 600.0
    """How long agents that may not go on wait for the others, and a lost shard for its holder."""
    recovers: bool = True
    """Whether workers live on through faults of others; else all begin afresh after any fault."""
    restarts_max: int = 10
    """Incidents in the window for each node; without recovery, restarts of all in the run."""
    restart_window_s: float = 21600.0
    restarts_forgiven_after_steps: int = 100
    restarts_without_progress_max: int = 3
    last_save_deadline_s: float = 300.0
    """How long a run that gives up may take to save its state."""
    awaits_nodes: bool = False
    """Whether a node that leaves is started again elsewhere, and the run waits for it."""
    policy: Policy = field(default_factory=Policy)
    """Which sizes the run may have, and when it changes its own."""

    @property
    def nodes_per_copy(self) -> int:
        """Return how many nodes it takes to hold a copy of the state."""
        return max(1, self.num_shards // self.num_local_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What a node has lost before the run got on, whatever it was and however much."""

    node: str
    at_s: float
    step: int
    """How many steps were committed by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastState:
    """A state that a start would go on from."""

    step: int
    place: str
    """Empty for the state before the first step, which lies nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSave:
    """What ranks are asked to save, each for itself, while no generation may open."""

    since_s: float
    step: int = -1
    name: str = ""
    asked: Mapping[int, str] = field(default_factory=dict)
    """Ranks that save, and the shard of each."""
    said: Mapping[int, StateSaved] = field(default_factory=dict)
    is_over: bool = False
    saved: LastState | None = None
    problem: str = ""
    """Why nothing was saved."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Agents: at hand, silent or ended."""

    present: Mapping[str, Join] = field(default_factory=dict)
    """Agents at hand, in the order in which they came."""
    known: frozenset[str] = frozenset()
    """All agents that were ever heard of."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent was heard of last."""
    gone: frozenset[str] = frozenset()
    """Agents that have ended for certain; the others that are not at hand may live on somewhere."""
    dead: frozenset[str] = frozenset()
    """Members of the generation that have ended for certain; an agent of the name may be back."""
    voters: frozenset[str] = frozenset()
    """Members of the generation that are at hand with what they hold of it."""
    awaited: frozenset[int] = frozenset()
    """Places whose node was a member under a lost coordinator and has not come yet."""
    shares_folder: bool = False
    """Whether all members see one folder of the run, in which a tie can be broken."""
    recorded: int = -1
    """The newest generation by the run's record, as it was read last."""
    recorded_starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent was heard of last by that record: others may know newer ones."""
    read_after: Ended | None = None
    """Whose end was known here when that reading was asked for."""
    came_s: float = 0.0
    """When an agent came that was not at hand."""
    asked_s: Mapping[str, float] = field(default_factory=dict)
    """Since when it is known of each agent that its node was asked to leave the run."""
    let_go: frozenset[str] = frozenset()
    """Nodes that were let go since the generation ended: a leave that was asked for is no fault."""

    def is_staying(self, node: str) -> bool:
        """Return whether nobody has asked a node at hand to leave the run."""
        return self.present[node].leaves_within_s is None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Members of the next generation: what was asked, what was agreed, and what the folder says."""

    ballot: Ballot = NO_BALLOT
    """In which this coordinator asks: later than all that those have promised whom it asks."""
    accepted: Mapping[str, tuple[Ballot, Layout]] = field(default_factory=dict)
    """What voters have agreed to for the generation that follows, or may have, and when."""
    proposal: Layout | None = None
    """The members that are being agreed to."""
    asked: frozenset[str] = frozenset()
    """Agents that have not answered yet whether they agree."""
    head: str = ""
    """Address of the proposal's first node at which no process listens."""
    probed: tuple[int, frozenset[int]] = (-1, frozenset())
    """After which generation those at hand were asked for a last word of what they hold, before
    these places are given away or the record is asked for."""
    leapt: int = -1
    """The generation before which others may have opened some, as long as nobody who knows that
    number is lost: they may have opened more behind it then."""
    is_claiming: bool = False
    """Whether an answer of the folder is waited for, about a record."""
    claimed_s: float = float("-inf")
    """Since when the folder is asked which members come next."""
    answered_s: float = float("-inf")
    """When the folder has answered last without a record."""
    record: Layout | None = None
    """Whose that record is."""
    founding: Record | None = None
    """Under which the run began, where it was here."""
    first: int = 0
    """The generation with which the run began, as far as it is known here."""
    refusal: str = ""
    """Why it may not begin, or the folder does not say who goes on."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The generation that is open or being stopped, and what its ranks have reported."""

    generation: int = -1
    """The open generation, or the one that is being stopped."""
    opened: int = -1
    """The newest one that has begun: what ranks held at its end is what counts."""
    layout: Layout | None = None
    """Who holds what in it."""
    nodes: tuple[str | None, ...] = ()
    """Who has the layout's places now; None for a place that waits for a node."""
    reports: Mapping[int, Report] = field(default_factory=dict)
    passed: tuple[int, int] = (-1, -1)
    """The newest update that has passed its gate: generation of its gradients, step behind it."""
    finished: Mapping[int, Finished] = field(default_factory=dict)
    is_stateless: bool = False
    """Whether no rank can hold a state that the others have lost."""
    first_failure: Failed | None = None
    """The first fault of the generation that is being stopped, or was stopped last."""
    planned: frozenset[int] = frozenset()
    """Ranks whose process has ended since as it was to: the rank's shard is not its own."""
    replacing: frozenset[int] = frozenset()
    """Ranks whose process is being ended on purpose: what it still says does not count."""

    @property
    def members(self) -> Layout:
        """Return the layout, which there is once a generation was opened."""
        assert self.layout is not None
        return self.layout

    def owns(self, node: str, rank: int) -> bool:
        """Return whether a rank is a node's; a node with another place may speak of its old one."""
        is_rank = 0 <= rank < self.members.world_size
        return is_rank and self.nodes[rank // self.members.num_local_ranks] == node


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses of the run so far, as `counters` counts them."""

    counted: int = -1
    """The newest generation whose losses are counted."""
    last_step: int = -1
    """How many steps were committed when the generation before ended."""
    incidents: tuple[Incident, ...] = ()
    fruitless: tuple[frozenset[str], ...] = ()
    """Which nodes lost processes in each generation in a row that committed no step."""
    saved: LastState | None = None
    """The newest that a rank has told of."""
    in_process: Mapping[int, int] = field(default_factory=dict)
    """Faults of each rank since the last progress that its process survived."""


@dataclass(frozen=True, kw_only=True)
class State(Roster, Agreement, Membership, Losses):
    """All that the coordinator knows."""

    options: Options
    stage: Stage = Stage.GATHERING
    since_s: float = 0.0
    """When the stage began."""
    patience_s: float = 0.0
    """How long is waited for what was missing last."""
    shortened_s: float = float("-inf")
    """Since when that is not as long as it was before."""
    told_away: tuple[int | str, ...] = ()
    """After which generation it was said which nodes are waited for, and these."""
    side_save: SideSave | None = None
    """The one since the generation has ended, once there was one."""
    giving_up: str | None = None
    """Why the run gives up, once it only saves its state."""
    ending: End | None = None
    """How the run has ended."""
    sizing: Sizing = field(default_factory=Sizing)
    """What has become of the run's size."""
    told_growth: Growth = field(default_factory=Growth)
    """What was said last of why nodes wait."""
    is_leaving: bool = False
    """Whether the ranks were asked to leave the open generation after a step."""
    is_stopping: bool = False
    """Whether the run ends, as too few nodes stay."""
    reason: str = ""
    """The reason for which the next generation is not open yet; empty while one is open."""


Decision = tuple[State, list[Action]]


def after(before: list[Action], decision: Decision) -> Decision:
    """Return a decision whose actions come after others."""
    state, actions = decision
    return state, [*before, *actions]


def hold(state: State, reason: str) -> Decision:
    """Return that the next generation does not open yet, and why."""
    return (state if state.reason == reason else replace(state, reason=reason)), []

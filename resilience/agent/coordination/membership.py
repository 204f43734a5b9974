"""What the coordinator knows, what it hears, and what it has done. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.agent.coordination.founding import Record
from resilience.comm.messages import (
    NO_BALLOT,
    Ballot,
    End,
    Failed,
    Finished,
    Join,
    Message,
    StateSaved,
)
from resilience.elastic.policy import Growth, Policy, Sizing
from resilience.state.layout import Layout
from resilience.state.report import Report

GATHERING = "gathering"
RUNNING = "running"
STOPPING = "stopping"
AGREEING = "agreeing"
ENDED = "ended"

Ended = frozenset[tuple[str, str]]
"""Which agents have ended for certain, each with its start."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that the coordinator knows."""

    options: Options
    stage: str = GATHERING
    since_s: float = 0.0
    """When the stage began."""
    came_s: float = 0.0
    """When an agent came that was not at hand."""
    generation: int = -1
    """The open generation, or the one that is being stopped."""
    opened: int = -1
    """The newest one that has begun: what ranks held at its end is what counts."""
    leapt: int = -1
    """The generation before which others may have opened some, as long as nobody who knows that
    number is lost: they may have opened more behind it then."""
    recorded: int = -1
    """The newest generation by the run's record, as it was read last."""
    recorded_starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent was heard of last by that record: others may know newer ones."""
    read_after: Ended | None = None
    """Whose end was known here when that reading was asked for."""
    layout: Layout | None = None
    """Who holds what in it."""
    nodes: tuple[str | None, ...] = ()
    """Who has the layout's places now; None for a place that waits for a node."""
    awaited: frozenset[int] = frozenset()
    """Places whose node was a member under a lost coordinator and has not come yet."""
    voters: frozenset[str] = frozenset()
    """Members of the generation that are at hand with what they hold of it."""
    dead: frozenset[str] = frozenset()
    """Members of the generation that have ended for certain; an agent of the name may be back."""
    gone: frozenset[str] = frozenset()
    """Agents that have ended for certain; the others that are not at hand may live on somewhere."""
    known: frozenset[str] = frozenset()
    """All agents that were ever heard of."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent was heard of last."""
    present: Mapping[str, Join] = field(default_factory=dict)
    """Agents at hand, in the order in which they came."""
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
    shares_folder: bool = False
    """Whether all members see one folder of the run, in which a tie can be broken."""
    is_claiming: bool = False
    """Whether an answer of the folder is waited for, about a record."""
    probed: tuple[int, frozenset[int]] = (-1, frozenset())
    """After which generation those at hand were asked for a last word of what they hold, before
    these places are given away or the record is asked for."""
    patience_s: float = 0.0
    """How long is waited for what was missing last."""
    shortened_s: float = float("-inf")
    """Since when that is not as long as it was before."""
    told_away: tuple[int | str, ...] = ()
    """After which generation it was said which nodes are waited for, and these."""
    claimed_s: float = float("-inf")
    """Since when the folder is asked which members come next."""
    answered_s: float = float("-inf")
    """When the folder has answered last without a record."""
    founding: Record | None = None
    """Under which the run began, where it was here."""
    first: int = 0
    """The generation with which the run began, as far as it is known here."""
    refusal: str = ""
    """Why it may not begin, or the folder does not say who goes on."""
    record: Layout | None = None
    """Whose that record is."""
    is_stateless: bool = False
    """Whether no rank can hold a state that the others have lost."""
    reports: Mapping[int, Report] = field(default_factory=dict)
    passed: tuple[int, int] = (-1, -1)
    """The newest update that has passed its gate: generation of its gradients, step behind it."""
    finished: Mapping[int, Finished] = field(default_factory=dict)
    counted: int = -1
    """The newest generation whose losses are counted."""
    last_step: int = -1
    """How many steps were committed when the generation before ended."""
    incidents: tuple[Incident, ...] = ()
    fruitless: tuple[frozenset[str], ...] = ()
    """Which nodes lost processes in each generation in a row that committed no step."""
    saved: LastState | None = None
    """The newest that a rank has told of."""
    side_save: SideSave | None = None
    """The one since the generation has ended, once there was one."""
    giving_up: str | None = None
    """Why the run gives up, once it only saves its state."""
    first_failure: Failed | None = None
    """The first fault of the generation that is being stopped, or was stopped last."""
    in_process: Mapping[int, int] = field(default_factory=dict)
    """Faults of each rank since the last progress that its process survived."""
    ending: End | None = None
    """How the run has ended."""
    planned: frozenset[int] = frozenset()
    """Ranks whose process has ended since as it was to: the rank's shard is not its own."""
    replacing: frozenset[int] = frozenset()
    """Ranks whose process is being ended on purpose: what it still says does not count."""
    sizing: Sizing = field(default_factory=Sizing)
    """What has become of the run's size."""
    told_growth: Growth = field(default_factory=Growth)
    """What was said last of why nodes wait."""
    is_leaving: bool = False
    """Whether the ranks were asked to leave the open generation after a step."""
    asked_s: Mapping[str, float] = field(default_factory=dict)
    """Since when it is known of each agent that its node was asked to leave the run."""
    let_go: frozenset[str] = frozenset()
    """Nodes that were let go since the generation ended: a leave that was asked for is no fault."""
    is_stopping: bool = False
    """Whether the run ends, as too few nodes stay."""

    @property
    def members(self) -> Layout:
        """Return the layout, which there is once a generation was opened."""
        assert self.layout is not None
        return self.layout

    def is_staying(self, node: str) -> bool:
        """Return whether nobody has asked a node at hand to leave the run."""
        return self.present[node].leaves_within_s is None

    def owns(self, node: str, rank: int) -> bool:
        """Return whether a rank is a node's; a node with another place may speak of its old one."""
        is_rank = 0 <= rank < self.members.world_size
        return is_rank and self.nodes[rank // self.members.num_local_ranks] == node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent has come; its workers are warm."""

    join: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """An agent has said goodbye, or is silent."""

    node: str
    is_dead: bool
    """Whether it has ended for certain; one that is only silent may live on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """There is evidence that a silent agent has ended, and all its workers."""

    node: str
    starts: frozenset[str]
    """Of these starts of the agent."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Who has the record of a generation's number."""

    generation: int
    layout: Layout | None
    """None where the folder did not say."""
    reason: str = ""
    """Why it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Whether agents that have just come may begin the run."""

    record: Record | None
    """Under which they do; None where they may not."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the record of the run says, which all that belong to it keep."""

    generation: int
    """The newest that was opened."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent its coordinators have heard of last."""
    gone: frozenset[str] = frozenset()
    """Agents of which that start has ended for certain."""
    after: Ended | None = None
    """Whose end was known to whoever has asked."""
    is_over: bool = False
    """The run has ended in order, with a status."""
    status: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A member's agent passed something on."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = NodeJoined | NodeLost | NodeEnded | Claimed | Judged | Recorded | Said | Tick


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Tell a node's agent something."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Have a node replace the process of one of its ranks."""

    node: str
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write an event."""

    event: str
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Return what a person who looks after the run is told of it, empty where nothing is."""
        match self.event:
            case "warning":
                return str(self.fields["text"])
            case "node_lost":
                is_dead = self.fields["is_dead"]
                return f"node {self.fields['node']} {'has left' if is_dead else 'is silent'}"
            case "node_awaited":
                return f"waits {self.fields['seconds']:g} s at most for {self.fields['reason']}"
            case "coordinator_replaced":
                return f"coordinates now, since node {self.fields['lost']} is not heard"
            case "node_ended":
                return f"node {self.fields['node']} has ended: {self.fields['reason']}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """Try to write the record of a generation's number, which whoever is first has for ever."""

    generation: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """Try to begin the run with the record of its folder."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Have another node coordinate: this agent's own leaves the run."""

    node: str


Action = Send | Replace | ClaimRecord | FoundRun | HandOver | Note
Decision = tuple[State, list[Action]]


def after(before: list[Action], decision: Decision) -> Decision:
    """Return a decision whose actions come after others."""
    state, actions = decision
    return state, [*before, *actions]

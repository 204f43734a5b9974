"""What the coordinator knows, what it hears, and what it has done. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.comm.messages import End, Failed, Finished, Join, Message
from resilience.state.layout import Layout
from resilience.state.report import Report

GATHERING = "gathering"
RUNNING = "running"
STOPPING = "stopping"
ENDED = "ended"

GAVE_UP_STATUS = 75
"""Exit status of a run that recovery has given up, for whoever may start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the coordinator is told on the command line."""

    num_nodes: int
    """With which the run starts; from then on the layout says how many there are."""
    num_standby_nodes: int = 0
    num_local_ranks: int
    num_shards: int = 1
    is_sharded: bool = False
    """Both as a layout has them."""
    last_call_s: float = 20.0
    """How long expected standby nodes are waited for once enough nodes are there."""
    join_deadline_s: float = 120.0
    """How long nodes, replacements and the ranks of a generation may take to come."""
    stop_deadline_s: float = 15.0
    regroup_s: float = 2.0
    """How long the nodes of a lost coordinator may take to find the next one."""
    recovers: bool = True
    """Whether workers live on through faults of others; else all begin afresh after any fault."""
    restarts_max: int = 10
    """Replacements of processes in the window; without recovery, of all of them in the run."""
    restart_window_s: float = 21600.0
    restarts_without_progress_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that the coordinator knows."""

    options: Options
    stage: str = GATHERING
    since_s: float = 0.0
    """When the stage began."""
    generation: int = -1
    """The open generation, or the one that is being stopped."""
    layout: Layout | None = None
    """Who holds what in it."""
    nodes: tuple[str | None, ...] = ()
    """Who has the layout's places now; None for a place that waits for a node."""
    awaited: frozenset[int] = frozenset()
    """Places whose node was a member under a lost coordinator and has not come yet."""
    present: Mapping[str, Join] = field(default_factory=dict)
    """Agents at hand, in the order in which they came."""
    silent: frozenset[str] = frozenset()
    """Agents that stopped answering and may still live."""
    reports: Mapping[int, Report] = field(default_factory=dict)
    finished: Mapping[int, Finished] = field(default_factory=dict)
    last_step: int = -1
    num_without_progress: int = 0
    restarts_s: tuple[float, ...] = ()
    first_failure: Failed | None = None
    """The first fault of the generation that is being stopped, or was stopped last."""
    in_process: Mapping[int, int] = field(default_factory=dict)
    """Faults of each rank since the last progress that its process survived."""
    ending: End | None = None
    """How the run has ended."""
    replacing: frozenset[int] = frozenset()
    """Ranks whose process is being ended on purpose: what it still says does not count."""

    @property
    def members(self) -> Layout:
        """Return the layout, which there is once a generation was opened."""
        assert self.layout is not None
        return self.layout

    def owns(self, node: str, rank: int) -> bool:
        """Return whether a rank is a node's; a node with another place may speak of its old one."""
        return node in self.nodes and rank in self.members.ranks_of(self.nodes.index(node))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent has come; its workers are warm."""

    join: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """An agent's connection is closed, or its lease has ended."""

    node: str
    is_dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A member's agent passed something on."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


Event = NodeJoined | NodeLost | Said | Tick


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


Action = Send | Replace | Note
Decision = tuple[State, list[Action]]

"""What agents, the coordinator and workers say to each other: JSON objects, one a line. Pure.

Each message is a frozen dataclass; `kind` on the wire is its class's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, StrictBool, StrictFloat, StrictInt

from resilience.runtime.records import fields_of, from_json, read_record, to_json
from resilience.state.layout import Layout
from resilience.state.report import Report, unpack_reports

GAVE_UP_STATUS = 75
"""Exit status of a run that recovery has given up, for whoever may start it again."""
OTHER_SHARD_STATUS = 72
"""Exit status of a worker that was given another shard than its own; a fresh one takes it."""
PLANNED = "planned"
"""Why ranks leave a generation that all leave after the same step: nothing has failed."""
CLOSED_CONNECTION = "/gloo/"
"""In the text of what gloo raises: a connection has ended, which is its peer's fault, if any."""
Ballot = tuple[StrictInt, str]
"""A number, and the start of the agent that asks in it as coordinator: no two ask in the same."""
NO_BALLOT: Ballot = (0, "")
LINE_BYTES_MAX = 64 << 20
"""No honest message is longer; 1024 reports take about a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Root of all messages."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Worker to agent: the process is warm and waits for a rank, or has one already."""

    pid: StrictInt
    has_block: StrictBool = False
    """The program has reached a block, so it can stop and report; otherwise it can only end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """Worker to agent, agent to coordinator: a fault that ends the generation."""

    generation: StrictInt
    rank: StrictInt
    reason: str
    """exception, died, hung, corrupt, group, node lost; other shard and planned are no faults."""
    text: str
    """One line for a person."""
    details: str = ""
    """A traceback, where there is one."""
    status: StrictInt = 1
    """Exit status of a run that ends for this fault alone."""
    quiet_s: StrictFloat = 0.0
    """Seconds from the last progress of the rank until the fault was noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Message):
    """Worker to agent, agent to coordinator: the training thread of this rank has stopped."""

    generation: StrictInt
    rank: StrictInt
    report: Mapping[str, Any]
    has_block: StrictBool = True
    """Whether the program has blocks, so that its ranks hold state; else none can be lost."""
    is_replaced: StrictBool = False
    """Whether an earlier process of the rank is gone, and what it held with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """Worker to agent, agent to coordinator: the block has returned, or must not be run again."""

    generation: StrictInt
    rank: StrictInt
    status: StrictInt
    """Exit status that the worker will end with."""
    text: str = ""
    is_done: StrictBool = False
    """Nothing that anybody needs comes after the block: once all ranks say so the run is good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Message):
    """Coordinator to agent, agent to worker: a generation begins."""

    generation: StrictInt
    layout: Layout
    rank: StrictInt = -1
    """Rank of the worker, which its agent fills in; the coordinator sends all agents the same."""
    local_rank: StrictInt = -1
    head: str
    """HOST:PORT of the first node at which no process listens yet, for programs that meet there on
    their own."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """Reports of all ranks at the end of the generation before, by `pack_reports`."""
    before: Layout | None = None
    """The ranks that the reports are of, where nodes come in or leave; else they are those of
    `layout`."""
    is_passing: StrictBool = False
    """The generation is left as soon as all ranks have one state: it has no size of the run."""
    shares_folder: StrictBool = False
    """Whether all nodes see one folder of the run."""
    is_last: StrictBool = False
    """The run gives up: the generation is for saving the state, and for nothing else."""

    def read_reports(self) -> tuple[Report, ...]:
        """Return the reports, by rank."""
        return unpack_reports(self.reports, self.before or self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Message):
    """Coordinator to agent, agent to worker: the generation is over, stop and report."""

    generation: StrictInt
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Message):
    """Coordinator to agent, agent to worker: have all ranks leave the generation after a step."""

    generation: StrictInt


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun(Message):
    """Coordinator to agent: the run cannot go on without the nodes that were asked to leave.

    The workers are asked to end, which they do together after a step.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LetGo(Message):
    """Coordinator to agent: the others hold the state, and wait for a node in this one's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Anybody to agent: this node is to leave the run."""

    node: str
    """Who is meant: another agent may have the address by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Message):
    """Agent to whoever has asked: the node leaves."""

    problem: str = ""
    """Why it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRank(Message):
    """Coordinator to agent: end the process of this rank and give the rank to another."""

    rank: StrictInt
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState(Message):
    """Coordinator to agent, agent to worker: save what the rank holds, without the other ranks.

    Its generation is over, and its node may not open the next one. The rank goes on holding what
    it holds.
    """

    generation: StrictInt
    rank: StrictInt
    step: StrictInt
    step_generation: StrictInt
    """Both as the rank has reported them."""
    name: str
    """Of this save: what others save of the same step is another thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(Message):
    """Worker to agent, agent to coordinator: what came of a SaveState."""

    generation: StrictInt
    rank: StrictInt
    name: str
    part: str = ""
    """Where this rank's part of the state lies, which is whole where all parts are."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Message):
    """Coordinator to agent, agent to worker: the run is over."""

    status: StrictInt
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Either way between agents, first on a connection: who this is, and whom it follows."""

    run: str
    """Name of the run, which agents of others do not belong to."""
    node: str
    address: str
    """HOST:PORT at which the agent can be reached."""
    start: str = ""
    """Random word of this start of the agent."""
    generation: StrictInt = -1
    """The newest generation that the agent has seen; -1 for one that has just come."""
    order: StrictInt
    """Its place among those of that generation that may lead; the lowest does."""
    leader: str = ""
    """Address of the coordinator, which is its own where it leads; empty where it seeks one."""
    ballot: Ballot = NO_BALLOT
    """The newest that it takes part in, which is its own where it leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """Agent to coordinator: this node's workers are warm and wait for ranks."""

    node: str
    address: str
    """HOST:PORT at which the agent can be reached should it become the coordinator."""
    start: str = ""
    """Random word of this start of the agent: another one of its name is not it."""
    generation: StrictInt = -1
    """The newest generation that the agent is or was a member of, or knows of."""
    layout: Layout | None = None
    """Who held what in it."""
    opened: StrictInt = -1
    """The newest one in which its workers were; the ones after it ended before they began."""
    promised: Ballot = NO_BALLOT
    """It agrees to nothing any more that is asked in an earlier one."""
    ballot: Ballot = NO_BALLOT
    """That of the newest proposal for the generation that follows, where it has agreed to one."""
    agreed: Layout | None = None
    """The members that it has agreed to."""
    shares_folder: StrictBool = False
    """Whether it sees the folder of the run that the coordinator sees."""
    known: tuple[str, ...] = ()
    """Names of all agents that it has ever heard of: who is silent may live on elsewhere."""
    leaves_within_s: float | None = None
    """The node was asked to leave the run, and has so long for it; null where it stays."""
    program: str = ""
    """What its workers run: job, code and torch's version."""

    @property
    def index(self) -> int:
        """Return the agent's place among the nodes of that generation; -1 for a standby."""
        return -1 if self.layout is None else self.layout.place_of(self.node, self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose(Message):
    """Coordinator to agent: these are to be the members of the next generation."""

    generation: StrictInt
    ballot: Ballot
    """That of the coordinator, which asks for the members of a generation once in it."""
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Agree(Message):
    """Agent to coordinator: whoever asks is told that the agent has agreed to this proposal."""

    generation: StrictInt
    ballot: Ballot
    head: str = ""
    """HOST:PORT of the node at which no process listens, in case it is the generation's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn(Message):
    """Coordinator to agent: the newest generation, which the agent's workers are not in."""

    generation: StrictInt
    opened: StrictInt
    """The newest one that has begun; a lower one where a member was lost before it could."""
    layout: Layout
    shares_folder: StrictBool
    """Whether all nodes see one folder of the run."""
    known: tuple[str, ...] = ()
    """Names of all agents that were ever heard of, who may have gone on with a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """Either way between agents: the agent ends, and its workers have ended with it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """Either way between agent and coordinator: renews the lease."""

    nodes: tuple[tuple[str, str], ...] = field(default=())
    """Name and address of every agent in order of succession; empty from an agent."""
    starts: tuple[str, ...] = ()
    """Random word of each one's start."""
    ballot: Ballot = NO_BALLOT
    """That of the coordinator: who has joined in an earlier one joins again."""


StoreCall = Literal[
    "set", "append", "get", "wait", "check", "add", "compare_set", "delete", "count", "cancel"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest(Message):
    """Worker to agent, agent to coordinator: a call of its generation's store."""

    generation: StrictInt
    number: StrictInt
    """Of the call among those of the worker; "cancel" has that of the call that it ends."""
    call: StoreCall
    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    """In base64."""
    worker: StrictInt = -1
    """Its agent's number of it, which the agent fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply(Message):
    """Coordinator to agent, agent to worker: what a call of the store has brought."""

    generation: StrictInt
    number: StrictInt
    worker: StrictInt
    values: tuple[str, ...] = ()
    """In base64, but for a flag: that has one value where it is set, and none where it is not."""
    problem: str = ""
    """Problem of a call that has failed, for a person; empty for one that has not."""


_KINDS: dict[str, type[Message]] = {
    name: kind
    for name, kind in tuple(globals().items())
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
}


_last: tuple[Message | None, bytes] = (None, b"")


def encode(message: Message) -> bytes:
    """Return the message as one line; one that is told to many in a row is encoded once."""
    global _last  # noqa: PLW0603 - read and written as a whole, by any thread
    known, line = _last
    if known is not message:
        line = to_json({"kind": type(message).__name__, **fields_of(message)}) + b"\n"
        _last = message, line
    return line


def decode(line: bytes) -> Message:
    """Read one line back; raises ValueError for one that is no message."""
    data = from_json(line, "message")
    name = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"no message: {line[:80]!r}")
    return read_record(_KINDS[name], data, name)


class LineReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are whole with these bytes."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._rest += tail
        else:
            lines = bytes(self._rest + head).split(b"\n")
            self._rest = bytearray(tail)
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"a message is longer than {LINE_BYTES_MAX} bytes")
        return [decode(line) for line in lines if line] if newline else []

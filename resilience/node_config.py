"""What a node's agent and daemon are told that is known when a job is rendered.

The launcher writes one file of it for all nodes of a run, and `--config` names it to both. What
differs from node to node, or from start to start, are arguments. Without torch.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from resilience.arguments import Parser
from resilience.plain_files import open_plain
from resilience.settings import (
    CLOSE_TIMEOUT_S,
    DRAIN_S,
    CheckpointlessSettings,
    Count,
    Namespace,
    Patience,
    Port,
    RamTier,
    Seconds,
    StoreTier,
    Whole,
)
from resilience.validation import first_problem

UNDONE_STATUS = 3
"""Exit status of a daemon that has ended before the store had what it was to get."""
UNSTORED_STATUS = 74
"""Exit status of a run that has ended well but for that; whoever starts it again mends nothing."""
_REMOVE_MAX_S = 120.0
_BYTES_MAX = 1 << 20


def remove_drain_s(drain_s: float, store_deadline_s: float) -> float:
    """Return how long a daemon sends to the store where its memory goes."""
    return max(drain_s, min(store_deadline_s, _REMOVE_MAX_S))


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ProgramConfig(_Section):
    """A program of a user's, which the workers run in the place of one of ours."""

    executed: bool
    """Whether the program is executed, by another interpreter or as an executable, and not forked
    from the agent's warm Python."""
    folder: str | None
    """Working directory of the program; null: the agent's."""
    alone: bool
    """Whether each node has one process, which starts what it likes: the words {node_rank},
    {num_nodes}, {head_addr} and {head_port} of its command are filled in, and variables of these
    names in capitals are set."""
    progress: tuple[str, ...]
    """Names of patterns, or regular expressions, that find steps in the output."""
    hang_deadline_s: Seconds | None
    """Seconds without a step that make a hang; without steps, without output and processor time.
    Null: no deadline."""


class AgentConfig(_Section):
    """How many workers there are, and what is done when one fails."""

    nodes_min: Count
    nodes_max: Count
    workers_per_node: Count
    """Workers of each node."""
    shards: Count | None
    """Ranks that together hold one copy of the state; null: each has one."""
    stages: Count = 1
    """Pipeline stages, each of so many ranks in a row, that these ranks are divided over."""
    join_deadline_s: Seconds
    """How long nodes may take to come where `checkpointless` does not say it."""
    max_restarts: Whole
    """How often all workers are started again where nothing recovers them."""
    checkpointless: CheckpointlessSettings | None
    sizes: tuple[Count, ...] = ()
    """A number of nodes that the run may go on with; repeatable, and without any it keeps its
    own."""
    hold_s: Patience = 5.0
    """How long a further node has to be there before the run grows by it."""
    scale_up_snooze_s: Patience = 60.0
    """How long the run keeps a size before it grows, twice as long each time the same node leaves
    again."""
    faulty_scale_down_timeout_s: Patience = 0.0
    """How long a lost node is waited for before the run goes on without it."""
    program: ProgramConfig | None = None
    """A program of a user's; null: one of ours."""


class MemorydConfig(_Section):
    """The checkpoints in a node's memory, and the store below it."""

    is_external: bool
    """The cluster starts the daemon, and the agent waits for it."""
    budget_mib: Count
    """Memory in MiB that all segments may take."""
    ram: RamTier
    store: StoreTier | None
    http_port: Port | None
    lease_s: Seconds
    """Seconds that a daemon goes on without an agent that supervises it."""
    # Null leaves that to the daemon.
    drain_s: Seconds | None
    """Seconds that the end waits for what the store has to get; where the arena goes, as long as
    the store's deadline, 120 at most."""

    def digest(self) -> str:
        """Return what tells daemons of other settings apart."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()

    def end_s(self, *, removes: bool) -> float:
        """Return how long the daemon's end takes at most; longer where its memory goes."""
        drain_s = 0.0
        if self.store:
            drain_s = DRAIN_S if self.drain_s is None else self.drain_s
            drain_s = remove_drain_s(drain_s, self.store.deadline_s) if removes else drain_s
        return drain_s + CLOSE_TIMEOUT_S


class BranchPoint(_Section):
    """A state of another run, with which a run begins that has none of its own yet."""

    run: str
    """The other run, by what a person knows it by."""
    url: str
    """The store that has the state: s3://BUCKET/PREFIX, or folder:/PATH of any characters."""
    # Of a store in S3, as the other run's job has them.
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    namespace: Namespace
    step: Whole


class RunConfig(_Section):
    """What the record of a run is told of its job."""

    recipe: str
    version: Count
    digest: str
    """SHA-256 of job.json in hex."""
    goes_on: bool = False
    """The run has saved its state, and never begins anew without it."""
    continues: bool = False
    """A person goes on with the run, whose job may be another one than before."""
    takes_over: bool = False
    """The run takes the namespace of its store from another run, and goes on from that."""
    branch: BranchPoint | None = None
    """Where the run begins, if not before the first step."""


class NodeConfig(_Section):
    """The file; a section is null where the cluster has no use for it."""

    run: RunConfig | None = None

    agent: AgentConfig | None
    memoryd: MemorydConfig | None

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2) + "\n"


def read_node_config(path: Path) -> NodeConfig:
    """Return what a file says; raises ValueError with one message where it is wrong."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            content = file.read(_BYTES_MAX)
        return NodeConfig.model_validate_json(content, strict=True)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = first_problem(error, whole="the whole file")
        raise ValueError(f"{str(path)!r}: {problem}") from error


def parse_config(prog: str, words: Sequence[str]) -> NodeConfig:
    """Return what the file says that a command line names, nothing without one.

    Ends the process with status 2 and one message where it is wrong.
    """
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    add_config_argument(parser)
    path = parser.parse_known_args(words)[0].config
    try:
        config = read_node_config(path) if path else NodeConfig(agent=None, memoryd=None)
    except ValueError as error:
        parser.error(f"argument --config: {error}")
    if config.memoryd and config.memoryd.store and config.memoryd.store.url is None:
        # A job may be rendered so, and is not to run without what its recipe asks for.
        parser.error(
            f"argument --config: {str(path)!r}: memoryd.store.url is null; set "
            "resilience.tiered.store.url or cluster.checkpoint_store_url, and render the job again"
        )
    return config


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command line, whose other options win over the file."""
    parser.add_argument("--config", type=Path, metavar="FILE",
        help="node.json of a run's folder, with what the launcher knows of the node")  # fmt: skip

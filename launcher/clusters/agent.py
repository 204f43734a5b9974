"""The command that starts one node's workers, the same on every cluster kind.

This is the one place that knows what an agent is called with.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.node_config import AgentConfig

_JOIN_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWords:
    """Shell words, quoted already, that differ between cluster kinds and nodes."""

    python: str
    config_path: str
    rdzv_endpoint: str
    rdzv_id: str
    job_path: str
    run_path: str
    node: str
    """Name under which the node writes events."""
    local_addr: str | None = None
    """Address under which other nodes reach this one; None lets the agent find it."""
    memoryd: tuple[str, ...] = ()
    """Arguments for the node's checkpoint daemon that are known at the start alone."""


def agent_command(job: Job, words: NodeWords) -> tuple[str, ...]:
    """Return the shell words that start and watch the workers of one node."""
    return (
        words.python,
        "-m",
        "resilience.agent",
        f"--config={words.config_path}",
        f"--rdzv-endpoint={words.rdzv_endpoint}",
        f"--rdzv-id={words.rdzv_id}",
        *((f"--local-addr={words.local_addr}",) if words.local_addr else ()),
        f"--node-name={words.node}",
        f"--run-dir={words.run_path}",
        *(f"--memoryd={each}" for each in words.memoryd),
        "--preload=training.preload",
        # Spares wait with all modules imported, at the beginning of the block that is run again.
        *(("--warm=program",) if job.resilience.checkpointless else ()),
        "--",
        words.python,
        "-m",
        "training",
        f"--job={words.job_path}",
        f"--run-dir={words.run_path}",
        f"--node-name={words.node}",
    )


def agent_config(job: Job, *, join_deadline_s: float = _JOIN_DEADLINE_S) -> AgentConfig:
    """Return what the agents of all nodes are told of their workers.

    `join_deadline_s` holds where the recipe says nothing of it, since nothing recovers.
    """
    elastic, trainer = job.resilience.elastic, job.trainer
    return AgentConfig(
        nodes_min=elastic.nodes_min if elastic else trainer.num_nodes,
        nodes_max=elastic.nodes_max if elastic else trainer.num_nodes,
        workers_per_node=trainer.num_devices,
        shards=_shards(job),
        join_deadline_s=join_deadline_s,
        max_restarts=trainer.max_restarts,
        checkpointless=job.resilience.checkpointless,
    )


def _shards(job: Job) -> int | None:
    return job.trainer.num_shards if isinstance(job.trainer, TorchTrainer) else None

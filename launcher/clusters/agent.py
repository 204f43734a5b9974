"""The command that starts one node's workers, the same on every cluster kind.

This is the one place that knows torchrun: a node agent of our own takes its
place here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWords:
    """Shell words, quoted already, that differ between cluster kinds and nodes."""

    python: str
    rdzv_endpoint: str
    rdzv_id: str
    job_path: str
    run_path: str
    node: str
    """Name under which the node writes events."""
    local_addr: str | None = None
    """Address under which other nodes reach this one; None lets torchrun find it."""


def agent_command(job: Job, words: NodeWords) -> tuple[str, ...]:
    """Return the shell words that start and watch the workers of one node."""
    trainer, elastic = job.trainer, job.resilience.elastic
    nodes = f"{elastic.nodes_min}:{elastic.nodes_max}" if elastic else str(trainer.num_nodes)
    local_addr = (f"--local-addr={words.local_addr}",) if words.local_addr else ()
    return (
        words.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={trainer.num_devices}",
        f"--max-restarts={trainer.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={words.rdzv_endpoint}",
        f"--rdzv-id={words.rdzv_id}",
        *local_addr,
        "-m",
        "training",
        f"--job={words.job_path}",
        f"--run-dir={words.run_path}",
        f"--node-name={words.node}",
    )

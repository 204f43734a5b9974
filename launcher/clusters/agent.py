"""The command that starts one node's workers, the same on every cluster kind.

This is the one place that knows what an agent is called with: ours where the
run recovers without checkpoints, torchrun where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.settings import CheckpointlessSettings


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
    """Address under which other nodes reach this one; None lets the agent find it."""


def agent_command(job: Job, words: NodeWords) -> tuple[str, ...]:
    """Return the shell words that start and watch the workers of one node."""
    settings = job.resilience.checkpointless
    if settings is None:
        return (*_torchrun(job, words), *_program(words))
    return (*_agent(job, settings, words), "--", words.python, *_program(words))


def _torchrun(job: Job, words: NodeWords) -> tuple[str, ...]:
    return (
        words.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={_num_nodes(job)}",
        f"--nproc-per-node={job.trainer.num_devices}",
        f"--max-restarts={job.trainer.max_restarts}",
        "--rdzv-backend=c10d",
        *_meeting(words),
    )


def _agent(job: Job, settings: CheckpointlessSettings, words: NodeWords) -> tuple[str, ...]:
    return (
        words.python,
        "-m",
        "resilience.agent",
        f"--nnodes={_num_nodes(job)}",
        f"--standby-nodes={settings.standby_nodes}",
        f"--nproc-per-node={job.trainer.num_devices}",
        *_shards(job),
        *_meeting(words),
        f"--node-name={words.node}",
        f"--run-dir={words.run_path}",
        f"--spares={settings.spares_per_node}",
        f"--hang-deadline-s={number_text(settings.hang_deadline_s)}",
        f"--stop-deadline-s={number_text(settings.stop_deadline_s)}",
        f"--join-deadline-s={number_text(settings.join_deadline_s)}",
        f"--restarts-max={settings.process_restarts_max}",
        f"--restart-window-s={settings.restart_window_s}",
        f"--restarts-without-progress-max={settings.restarts_without_progress_max}",
        f"--transfer-buffer-mib={settings.transfer_buffer_mib}",
        # Spares wait with all modules imported, at the beginning of the block that is run again.
        "--warm=program",
        "--preload=training.preload",
    )


def _meeting(words: NodeWords) -> tuple[str, ...]:
    """Return where the nodes meet: the same options for either agent."""
    local_addr = (f"--local-addr={words.local_addr}",) if words.local_addr else ()
    return f"--rdzv-endpoint={words.rdzv_endpoint}", f"--rdzv-id={words.rdzv_id}", *local_addr


def _program(words: NodeWords) -> tuple[str, ...]:
    return (
        "-m",
        "training",
        f"--job={words.job_path}",
        f"--run-dir={words.run_path}",
        f"--node-name={words.node}",
    )


def _shards(job: Job) -> tuple[str, ...]:
    trainer = job.trainer
    if not isinstance(trainer, TorchTrainer) or trainer.num_shards is None:
        return ()
    return (f"--shards={trainer.num_shards}",)


def _num_nodes(job: Job) -> str:
    elastic = job.resilience.elastic
    return f"{elastic.nodes_min}:{elastic.nodes_max}" if elastic else str(job.trainer.num_nodes)


def number_text(value: float) -> str:
    """Return a number of seconds as a person writes it."""
    return str(int(value)) if value.is_integer() else repr(value)

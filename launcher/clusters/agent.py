"""The command that starts one node's workers, the same on every cluster kind.

This is the one place that knows what an agent is called with.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from launcher.clusters.program import preloads, program_config, script_words
from launcher.job import Job
from launcher.job.grace import workers_grace_s
from launcher.job.workload import ScriptTrainer
from launcher.rundir import JOB_FILE, NODE_FILE
from resilience.node_config import AgentConfig, BranchPoint, RunConfig
from resilience.run_record import FAULTS_VARIABLE, RUN_DIR_VARIABLE
from resilience.settings import FAULT_LIST

_JOIN_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a person wants with a start of a run, which is no part of its job."""

    goes_on: bool = False
    """The run has saved its state, and does not begin without it."""
    continues: bool = False
    """The run goes on in its folder, where its job may be another one than before."""
    takes_over: bool = False
    """The run takes the namespace of its store from another run."""
    branch: BranchPoint | None = None
    """The state of another run with which the run begins."""


NO_INTENT = Intent()


def agent_command(
    job: Job,
    *,
    python: str,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_attempt: str | None = None,
    node: str,
    token_file: str,
    config_path: str = f'"$run_dir/{NODE_FILE}"',
    job_path: str = f'"$run_dir/{JOB_FILE}"',
    run_path: str = '"$run_dir"',
    local_addr: str | None = None,
    node_options: tuple[str, ...] = (),
    nnodes: str | None = None,
    memoryd: tuple[str, ...] = (),
    node_state_command: str | None = None,
) -> tuple[str, ...]:
    """Return the shell words that start and watch the workers of one node.

    What differs between cluster kinds and nodes is given as shell words, quoted already.
    `rdzv_endpoint` has the addresses of all nodes' agents, with commas between (empty: an operator
    gives them), `rdzv_attempt` is
    how often the scheduler has started the run again, where it counts that, `node` the name under
    which the node writes events, `token_file` the file with the run's token, `local_addr` the
    address under which other nodes reach it (None lets the agent find it), `node_options` what is
    said of some nodes alone, `nnodes` how many begin the run, as MIN:MAX (None: as many as the job
    says), `node_state_command` what says whether a silent node is off, and `memoryd` are the
    arguments of the node's checkpoint daemon that are known at the start alone.
    """
    grace_s = workers_grace_s(job)
    # A program of a user's may keep its checkpoints in the run's folder.
    is_script = isinstance(job.trainer, ScriptTrainer)
    variables = ("env", f"{RUN_DIR_VARIABLE}={run_path}", *_faults(job)) if is_script else ()
    return (
        *variables,
        python,
        "-m",
        "resilience.agent",
        f"--config={config_path}",
        *((f"--rdzv-endpoint={rdzv_endpoint}",) if rdzv_endpoint else ()),
        f"--rdzv-id={rdzv_id}",
        *((f"--rdzv-attempt={rdzv_attempt}",) if rdzv_attempt else ()),
        *((f"--local-addr={local_addr}",) if local_addr else ()),
        *node_options,
        *((f"--nnodes={nnodes}",) if nnodes else ()),
        f"--node-name={node}",
        f"--token-file={token_file}",
        *(("--tls",) if job.cluster.tls else ()),
        f"--run-dir={run_path}",
        *(f"--memoryd={each}" for each in memoryd),
        *((f"--node-state-command={node_state_command}",) if node_state_command else ()),
        *((f"--grace-s={grace_s:g}",) if grace_s is not None else ()),
        *(f"--preload={each}" for each in preloads(job)),
        # Spares wait with all modules imported, at the beginning of the block that is run again.
        *(("--warm=program",) if job.resilience.checkpointless and not is_script else ()),
        "--",
        *_program_words(job, python, job_path=job_path, run_path=run_path, node=node),
    )


def _faults(job: Job) -> tuple[str, ...]:
    """Return the variable of the faults that a protected loop fires, as words of the shell."""
    if (faults := job.resilience.faults) is None:
        return ()
    text = FAULT_LIST.dump_json(faults.injected, exclude_none=True).decode()
    return (f"{FAULTS_VARIABLE}={shlex.quote(text)}",)


def _program_words(
    job: Job, python: str, *, job_path: str, run_path: str, node: str
) -> tuple[str, ...]:
    if isinstance(job.trainer, ScriptTrainer):
        return script_words(job.trainer, python)
    return (
        python,
        "-m",
        "recipes_training",
        f"--job={job_path}",
        f"--run-dir={run_path}",
        f"--node-name={node}",
    )


def agent_config(job: Job, *, join_deadline_s: float = _JOIN_DEADLINE_S) -> AgentConfig:
    """Return what the agents of all nodes are told of their workers.

    `join_deadline_s` holds where the recipe says nothing of it, since nothing recovers.
    """
    elastic, trainer = job.resilience.elastic, job.trainer
    how: dict[str, Any] = {}
    if elastic and job.resilience.checkpointless:
        how = {
            "sizes": elastic.sizes,
            "hold_s": elastic.hold_s,
            "scale_up_snooze_s": elastic.scale_up_snooze_s,
            "faulty_scale_down_timeout_s": elastic.faulty_scale_down_timeout_s or 0,
        }
    return AgentConfig(
        **how,
        nodes_min=elastic.nodes_min if elastic and how else trainer.num_nodes,
        # Those that start; further ones come in later, or with another start.
        nodes_max=trainer.num_nodes,
        workers_per_node=trainer.workers_per_node,
        shards=trainer.num_shards,
        stages=trainer.num_stages,
        join_deadline_s=join_deadline_s,
        max_restarts=trainer.max_restarts,
        checkpointless=job.resilience.checkpointless,
        program=program_config(job),
    )


def run_config(job: Job, intent: Intent) -> RunConfig:
    """Return what the record of a run is told of the job that it is started with."""
    return RunConfig(
        recipe=job.recipe.name,
        version=job.recipe.version,
        digest=job.digest(),
        goes_on=intent.goes_on,
        continues=intent.continues,
        takes_over=intent.takes_over,
        branch=intent.branch,
    )

"""This project's own recovery in the fault benchmarks, with the project's own Python."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.faultbench import RunningJob, System, job_environment
from benchmarks.jobplan import JobPlan
from benchmarks.processes import Command, ProcessJob

HANG_DEADLINE_S = 2.0
"""How long a stopped rank may hold the others up; the peers' time-outs are 2 to 90 s."""
LONG_DEADLINE = ("--hang-deadline-s=120",)
"""Of an agent, for jobs in which no rank is stopped."""
WORKER = "benchmarks.recovery_peers.ours_worker"
PRELOADED = ("torch", "transformers", "benchmarks.recovery_peers.job")
# Before the stand-ins: transformers is imported as it is.
MEGATRON_PRELOADED = (
    "torch",
    "benchmarks.recovery_peers.job",
    "recipes_training.megatron.preload_cpu",
)


def start(plan: JobPlan) -> RunningJob:
    """Start a node agent, which starts the ranks and keeps one warm spare."""
    return start_workers(plan, [WORKER], preloaded=PRELOADED)


def start_program(worker: str, plan: JobPlan) -> RunningJob:
    """Start the same with another program, whose spares have its imports."""
    program = [f"benchmarks.recovery_peers.{worker}"]
    return start_workers(plan, program, preloaded=PRELOADED, options=["--warm=imports"])


def start_megatron(plan: JobPlan, overrides: Sequence[str] = ()) -> ProcessJob:
    """Start the same with the Megatron trainer, two of whose ranks hold a copy."""
    from benchmarks.recovery_peers import megatron_job

    megatron_job.write_job(plan, *overrides)
    program = ["benchmarks.recovery_peers.megatron_ours"]
    return start_workers(plan, program, preloaded=MEGATRON_PRELOADED, options=["--shards=2"])


def start_workers(
    plan: JobPlan,
    program: Sequence[object],
    *,
    preloaded: Sequence[str],
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> ProcessJob:
    """Start an agent whose ranks run a program, forked from a process with those `preloaded`.

    A program is a module with its arguments. `options` of the agent replace those of all jobs.
    """
    known = {
        "--nproc-per-node": plan.num_ranks,
        "--rdzv-endpoint": f"127.0.0.1:{plan.ports[0]}",
        "--local-addr": "127.0.0.1",
        "--node-name": "node-0",
        "--run-dir": plan.run_dir,
        "--warm": "program",
        "--hang-deadline-s": HANG_DEADLINE_S,
        "--restarts-max": 1000,
    }
    arguments = [sys.executable, "-m", "resilience.agent"]
    arguments += [*(f"{key}={value}" for key, value in known.items()), *options]
    for module in preloaded:
        arguments += ["--preload", module]
    arguments += ["--", "python", "-m", *map(str, program)]
    environment = {**job_environment(plan), **(variables or {})}
    return ProcessJob(plan.run_dir, [Command(arguments=arguments, environment=environment)])


def why_missing() -> str | None:
    """Return why ours cannot run here, or None."""
    return None


OURS = System(
    name="ours",
    what="this project: recovery in the process, state from a live replica",
    start=start,
    missing=why_missing,
    places=("backward", "update"),
)
PROTECTED = replace(
    OURS,
    name="protected",
    what="this project: a program's own loop under resilience.protect",
    start=partial(start_program, "protected_worker"),
)
TRAINER = replace(
    OURS,
    name="trainer",
    what="this project: a transformers.Trainer",
    start=partial(start_program, "trainer_worker"),
)
OURS_MEGATRON = replace(
    OURS,
    what="this project: its Megatron trainer, recovery in the process",
    start=start_megatron,
)

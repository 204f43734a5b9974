"""Starts the overhead benchmarks' workers: under this project's agent, or under torchrun."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faultbench import POLL_S, job_environment, tail
from benchmarks.jobplan import JobPlan
from benchmarks.processes import Command, ProcessJob

HANG_DEADLINE_S = 120.0


def agent_job(
    plan: JobPlan, program: Sequence[object], preload: Sequence[str], more: Sequence[str] = ()
) -> ProcessJob:
    """Start `python -m PROGRAM` under an agent that keeps one warm spare."""
    options = {
        "--nproc-per-node": plan.num_ranks,
        "--rdzv-endpoint": f"127.0.0.1:{plan.ports[0]}",
        "--local-addr": "127.0.0.1",
        "--node-name": "node-0",
        "--run-dir": plan.run_dir,
        "--warm": "program",
        "--hang-deadline-s": HANG_DEADLINE_S,
    }
    arguments = [sys.executable, "-m", "resilience.agent"]
    arguments += [*(f"{key}={value}" for key, value in options.items()), *more]
    for module in preload:
        arguments += ["--preload", module]
    arguments += ["--", "python", "-m", *map(str, program)]
    return _start(plan, arguments)


def torchrun_job(plan: JobPlan, program: Sequence[object]) -> ProcessJob:
    """Start `python -m PROGRAM` under torchrun."""
    options = {
        "--nnodes": 1,
        "--nproc-per-node": plan.num_ranks,
        "--master-addr": "127.0.0.1",
        "--master-port": plan.ports[0],
    }
    arguments = [sys.executable, "-m", "torch.distributed.run"]
    arguments += [f"{key}={value}" for key, value in options.items()]
    arguments += ["-m", *map(str, program)]
    return _start(plan, arguments)


def plain_agent_job(plan: JobPlan, program: Sequence[object]) -> ProcessJob:
    """Start `python -m PROGRAM` under a node agent that does not recover."""
    options = {
        "--nproc-per-node": plan.num_ranks,
        "--rdzv-endpoint": f"127.0.0.1:{plan.ports[0]}",
        "--local-addr": "127.0.0.1",
        "--run-dir": plan.run_dir,
        "--preload": "torch",
    }
    arguments = [sys.executable, "-m", "resilience.agent", "--no-recovery"]
    arguments += [f"{key}={value}" for key, value in options.items()]
    arguments += ["--", "python", "-m", *map(str, program)]
    return _start(plan, arguments)


def _start(plan: JobPlan, arguments: Sequence[str]) -> ProcessJob:
    environment = job_environment(plan)
    return ProcessJob(plan.run_dir, [Command(arguments=arguments, environment=environment)])


def wait_for_job(
    job: ProcessJob,
    limit_s: float,
    *,
    look: Callable[[], None] = lambda: None,
    every_s: float = POLL_S,
) -> None:
    """Wait for a job's end and look at it meanwhile; raises RuntimeError where it failed."""
    until_s = time.monotonic() + limit_s
    words = ""
    try:
        next_s = time.monotonic()
        while job.poll():
            look()
            if time.monotonic() > until_s:
                words = f"not through after {limit_s:.0f} s"
                break
            next_s = max(next_s + every_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
    finally:
        job.end()
    status = job.running[0][1].returncode
    if words or status:
        words = words or f"ended with status {status}"
        raise RuntimeError(f"the job {words}: {tail(Path(job.run_dir, 'log'))}")

"""The systems that ours is compared with: how each is started at which settings.

They run in an environment of their own, made by benchmarks/install-peers.sh.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.faultbench import RunningJob, System, job_environment
from benchmarks.jobplan import JobPlan
from benchmarks.processes import Command, ProcessJob

ROOT = Path(__file__).parents[1]
VENV = Path(os.environ.get("PEERS_VENV", ROOT / ".venv-peers")).absolute()
PYTHON = VENV / "bin" / "python"
WORKERS = "benchmarks.recovery_peers"
RESTARTS = ("--max-restarts=1000", "--monitor-interval=0.1")


def why_missing(peer: str) -> str | None:
    """Return why a peer cannot run here, by what the installer wrote, or None."""
    try:
        text = (VENV / "peers.txt").read_text("utf-8")
    except FileNotFoundError:
        return f"no {VENV}; run benchmarks/install-peers.sh"
    return find_reason(text, peer)


def find_reason(text: str, peer: str) -> str | None:
    """Find what the installer wrote against a peer; None if it is installed."""
    for line in text.splitlines():
        name, state, words = line.split("\t", 2)
        if name == peer:
            return None if state == "installed" else f"not installed: {words}"
    return f"the installer ended before {peer}; run benchmarks/install-peers.sh"


def rank_environment(plan: JobPlan, rank: int) -> dict[str, str]:
    """Return the environment of a rank that no launcher starts."""
    return {
        **job_environment(plan),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.num_ranks),
        "MASTER_PORT": str(plan.ports[2]),
    }


def start_torchrun(plan: JobPlan) -> RunningJob:
    """Start torchrun, which starts the ranks."""
    return torchrun(plan, [f"{WORKERS}.torchrun_worker"], python=str(PYTHON), options=RESTARTS)


def start_torchrun_megatron(plan: JobPlan) -> RunningJob:
    """Start the same with Megatron-Core, which this project's own Python has."""
    from benchmarks.recovery_peers import megatron_job

    megatron_job.write_job(
        plan,
        # An instance of the distributed optimizer alone: a user has no need of a second.
        "trainer.num_replicas=1",
        "resilience.checkpointless=null",
        # What is saved after each step has to be there.
        "trainer.overlap_param_gather=false",
    )
    return torchrun(plan, [f"{WORKERS}.megatron_torchrun"], options=RESTARTS)


def torchrun(
    plan: JobPlan,
    program: Sequence[object],
    *,
    python: str = sys.executable,
    options: Sequence[str] = (),
) -> ProcessJob:
    """Start torchrun, whose ranks run a module with its arguments."""
    arguments = [python, "-m", "torch.distributed.run", "--nnodes=1", *options]
    arguments += [f"--nproc-per-node={plan.num_ranks}"]
    arguments += ["--master-addr=127.0.0.1", f"--master-port={plan.ports[0]}"]
    arguments += ["-m", *map(str, program)]
    return ProcessJob(
        plan.run_dir, [Command(arguments=arguments, environment=job_environment(plan))]
    )


def start_nvrx(plan: JobPlan, *, words: tuple[str, ...] = ()) -> RunningJob:
    """Start the ranks; nothing watches them from outside, as the wrapper is meant to be used."""
    arguments = [str(PYTHON), "-m", f"{WORKERS}.nvrx_worker", *words]
    return ProcessJob(
        plan.run_dir,
        [
            Command(arguments=arguments, environment=rank_environment(plan, rank))
            for rank in range(plan.num_ranks)
        ],
    )


def start_torchft(plan: JobPlan) -> RunningJob:
    """Start a lighthouse and one replica group per rank, each started again when it dies."""
    address = f"127.0.0.1:{plan.ports[0]}"
    shared = {"TORCHFT_LIGHTHOUSE": f"http://{address}"}
    lighthouse = [str(VENV / "bin" / "torchft_lighthouse"), "--min_replicas=2", f"--bind={address}"]
    commands = [Command(arguments=lighthouse, environment=job_environment(plan), serves=True)]
    commands += [
        Command(
            arguments=[str(PYTHON), "-m", f"{WORKERS}.torchft_worker"],
            environment={**rank_environment(plan, rank), **shared},
            restarts=True,
        )
        for rank in range(plan.num_ranks)
    ]
    return ProcessJob(plan.run_dir, commands)


def why_no_megatron_checkpoint() -> str | None:
    """Return why Megatron cannot save here, or None."""
    return None if find_spec("psutil") else "Megatron saves with psutil; run pip install psutil"


TORCHRUN = System(
    name="torchrun",
    what="restart of all ranks, checkpoint in memory every step",
    start=start_torchrun,
    missing=functools.partial(why_missing, "torchrun"),
)
TORCHRUN_MEGATRON = System(
    name="torchrun",
    what="restart of all ranks, Megatron's own checkpoint in memory every step",
    start=start_torchrun_megatron,
    missing=why_no_megatron_checkpoint,
)
TORCHRUN_10 = System(
    name="torchrun-10",
    what="restart of all ranks, checkpoint in memory every 10 steps",
    start=start_torchrun,
    missing=functools.partial(why_missing, "torchrun"),
    checkpoint_every=10,
    fault_spacing=13,
)
NVRX = System(
    name="nvrx",
    what="nvidia-resiliency-ext in-process, defaults, gloo time-out 10 s",
    start=start_nvrx,
    missing=functools.partial(why_missing, "nvrx"),
    replaces_ranks=False,
)
NVRX_FAST = System(
    name="nvrx-fast",
    what="nvidia-resiliency-ext in-process, intervals 10 ms, no last call, gloo time-out 2 s",
    start=functools.partial(start_nvrx, words=("fast",)),
    missing=functools.partial(why_missing, "nvrx"),
    gloo_timeout_s=2.0,
    replaces_ranks=False,
)
TORCHFT = System(
    name="torchft",
    what="4 replica groups, HTTP transport, gloo time-out 5 s, dead group restarted at once",
    start=start_torchft,
    missing=functools.partial(why_missing, "torchft"),
    gloo_timeout_s=5.0,
    handles_stop=False,
    fault_spacing=150,
)
PEERS = (TORCHRUN, TORCHRUN_10, NVRX, NVRX_FAST, TORCHFT)

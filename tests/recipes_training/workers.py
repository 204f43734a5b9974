"""Runs the workers of a job and reads what they left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.job import Job
from resilience.events import Event, read_events
from tests import warm
from tests.ports import free_ports
from tests.recipes_training.jobs import write_job

ROOT = Path(__file__).parents[2]
MAIN = "recipes_training.__main__:main"
# The last is what Megatron asks for; who stands in for its GPUs has set it in the server alone.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
_WITH_MEGATRON = "tests.recipes_training.megatron.warm_server"


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    folder: Path
    statuses: list[int]

    @property
    def events(self) -> list[Event]:
        return read_events(self.folder / "events.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [{**each.fields, "step": each.step} for each in self.events if each.event == "step"]

    @property
    def losses(self) -> list[float]:
        return [each["loss"] for each in self.steps]

    def named(self, event: str) -> list[Event]:
        return [each for each in self.events if each.event == event]

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"worker-{rank}.log").read_text()

    def weights(self) -> dict[str, bytes]:
        import torch
        from safetensors.torch import load_file

        folder = self.folder / "checkpoint"
        tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(path))
        return {
            name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
        }


class Workers:
    """Starts workers as torchrun would, by forking a process that has torch already."""

    def run(
        self,
        job: Job,
        folder: Path,
        *,
        num_workers: int | None = None,
        target: str = MAIN,
        is_success_expected: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run all workers of the job to their end."""
        path = write_job(folder, job)
        size = num_workers or job.trainer.world_size
        port = free_ports(1)[0]
        words = [f"--job={path}", f"--run-dir={folder}", "--node-name=node-0"]
        started = [
            call(
                target,
                words,
                {**rank_variables(rank, size, port), **(variables or {})},
                folder / f"worker-{rank}.log",
                needs_megatron=job.trainer.kind == "megatron",
            )
            for rank in range(size)
        ]
        outcome = Outcome(folder, [each.wait() for each in started])
        if is_success_expected:
            assert outcome.statuses == [0] * size, "\n".join(map(outcome.log, range(size)))
        return outcome


def call(
    target: str,
    words: list[str],
    variables: Mapping[str, str],
    log: Path,
    *,
    needs_megatron: bool = False,
) -> warm.Process:
    """Call a function, named as MODULE:FUNCTION, in a process that prints into a file."""
    with log.open("wb") as output:
        return warm.start(
            ["tests.recipes_training.called", target, *words],
            folder=ROOT,
            environment={**os.environ, **_ONE_THREAD, **variables},
            output=output,
            server=_WITH_MEGATRON if needs_megatron else "tests.warm_server",
        )


def run_torchrun(
    folder: Path,
    job: Job,
    *,
    num_workers: int,
    module: str = "recipes_training",
    max_restarts: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run the job's workers under torchrun itself."""
    options = [f"--nproc-per-node={num_workers}", f"--max-restarts={max_restarts}"]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--rdzv-endpoint=127.0.0.1:0",
            *options,
            "--rdzv-backend=c10d",
            "--local-addr=127.0.0.1",
            "-m",
            module,
            f"--job={write_job(folder, job)}",
            f"--run-dir={folder}",
            "--node-name=node-0",
        ],
        cwd=ROOT,
        env={**os.environ, **_ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=300,
    )


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a worker of a node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }

"""A run that saves with AWS's own library, against our door for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from tests.launcher.shipped import shipped_job
from tests.ports import free_ports
from tests.recipes_training.jobs import make_job, write_job
from tests.recipes_training.workers import ROOT, Outcome, Workers, rank_variables
from tests.resilience.tiered.s3_server import s3_server
from tests.scenarios.tiered.runs import folder_store, loads, saved_steps, start_nodes, tiered

PYTHON = ROOT / ".venv-aws-tiered/bin/python"
LIMIT_S = 200.0

needs_library = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; scripts/install-aws-checkpointing.sh makes it"
)


def aws_job(
    max_steps: int, *, store: str | None = None, store_every: int = 4, **resilience: Any
) -> Job:
    """Return a small job whose cluster is one that AWS's daemon runs on.

    With a `store`, an s3:// URL, checkpoints of each so many steps go there.
    """
    cluster = shipped_job("llama/llama3_tiny_pretrain", "hyperpod").cluster
    settings = tiered(every_n_steps=4, backend="aws")
    settings["ram"] |= {"keep": 3}
    if store is not None:
        rest = {"every_n_steps": store_every, "waiting_max": None, "required": False}
        settings["store"] = folder_store("", url=store, **rest)
    return make_job(
        trainer={
            "num_devices": 2,
            "sharding": "full",
            "max_steps": max_steps,
            "optimizer": {"decay_steps": 400},
        },
        resilience={"tiered": settings, **resilience},
        cluster=cluster.model_dump(mode="json", by_alias=True),
        name="tiny-aws",
    )


def train_with_library(
    folder: Path, job: Job, url: str, *, module: str = "recipes_training", **variables: str
) -> Outcome:
    """Run both workers in the environment that has AWS's library; its door is their proxy."""
    path, port = write_job(folder, job), free_ports(1)[0]
    words = ["-m", module, f"--job={path}", f"--run-dir={folder}", "--node-name=node-0"]
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= variables or {"http_proxy": url}
    processes = []
    for rank in range(2):
        with (folder / f"worker-{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [PYTHON, *words],
                    cwd=ROOT,
                    env={**environment, **rank_variables(rank, 2, port)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        return Outcome(folder, [each.wait(LIMIT_S) for each in processes])
    finally:
        for each in processes:
            each.kill()
            each.wait()


@needs_library
@pytest.mark.slow
def test_run_goes_on_from_what_the_library_has_saved(tmp_path: Path, workers: Workers) -> None:
    calm = aws_job(10).model_copy(update={"resilience": make_job().resilience})
    undisturbed = workers.run(calm, tmp_path / "calm")
    (port,) = free_ports(1)

    with start_nodes(tmp_path / "nodes", options=["--http", f"127.0.0.1:{port}"]):
        url = f"http://127.0.0.1:{port}"
        first = train_with_library(tmp_path / "run", aws_job(7), url)
        second = train_with_library(tmp_path / "run", aws_job(10), url)

    assert (first.statuses, second.statuses) == ([0, 0], [0, 0]), first.log() + second.log()
    assert loads(second) == [(0, 7, "aws"), (1, 7, "aws")]
    # Of both runs: by the cadence, and the last step of each.
    assert saved_steps(second) == [4, 7, 8, 10]
    assert second.weights() == undisturbed.weights()


@needs_library
@pytest.mark.slow
def test_run_goes_on_from_what_the_library_has_stored(tmp_path: Path, workers: Workers) -> None:
    calm = aws_job(10).model_copy(update={"resilience": make_job().resilience})
    undisturbed = workers.run(calm, tmp_path / "calm")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    with s3_server(tmp_path) as server:
        server.make_bucket("bucket")

        def train(max_steps: int, *, number: int) -> Outcome:
            job = aws_job(max_steps, store="s3://bucket/base/")
            options = ["--http", f"127.0.0.1:{port}"]
            # Each time another daemon, which knows of nothing.
            with start_nodes(tmp_path / f"nodes-{number}", options=options):
                return train_with_library(
                    tmp_path / "run",
                    job,
                    url,
                    module="tests.scenarios.tiered.aws_main",
                    TEST_DOOR=url,
                    AWS_ENDPOINT_URL=server.endpoint,
                )

        first, second = train(7, number=1), train(10, number=2)
    third = train(12, number=3)

    assert (first.statuses, second.statuses) == ([0, 0], [0, 0]), first.log() + second.log()
    # By its cadence S3 would have got steps 4 and 8 alone.
    assert loads(second) == [(0, 7, "aws"), (1, 7, "aws")]
    assert saved_steps(second) == [4, 7, 8, 10]
    assert not second.named("checkpoint_failed")
    assert second.weights() == undisturbed.weights()
    assert third.statuses == [1, 1]
    assert "recipes_training: cannot tell which checkpoints there are: " in third.log(0)
    assert "Traceback" not in third.log(0) + third.log(1)

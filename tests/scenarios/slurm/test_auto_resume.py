"""A step that srun starts again on other nodes, as HyperPod's does where it has replaced one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience.events import read_events
from tests.launcher.command import launch
from tests.scenarios.slurm.jobs import Slurm, processes, train_here
from tests.scenarios.slurm.test_run import check_same_bits
from tests.scenarios.slurm.test_tiered import arenas, logs, wait_for_checkpoints

pytest.importorskip("torch", reason="a worker needs torch")
RECIPE = (
    "recipe=llama/llama3_tiny_tiered",
    "trainer.max_steps=120",
    "trainer.log_every_n_steps=1",
)
WITHOUT_RECOVERY = "resilience.checkpointless=null"
# The job has a node more than its step, which takes the place of the second at the second try.
SRUN = """\
#!/bin/bash
readarray -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
/usr/bin/srun --nodelist="${nodes[0]},${nodes[1]}" "$@" && exit
exec /usr/bin/srun --nodelist="${nodes[0]},${nodes[2]}" "$@"
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), (WITHOUT_RECOVERY,)], ids=["recovers", "plain"])
def test_daemons_of_the_nodes_of_now_have_what_the_lost_node_had(
    slurm: Slurm, tmp_path: Path, more: tuple[str, ...]
):
    recipe = (*RECIPE, *more)
    train_here(tmp_path / "here", *recipe)
    run_dir = tmp_path / "there"
    there = launch(
        *recipe,
        "cluster=slurm",
        "cluster.rdzv_host=127.0.0.1",
        f"cluster.python={sys.executable}",
        f"run.dir={run_dir}",
        folder=tmp_path,
    )
    assert there.status == 0, there.err
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job_id = subprocess.run(
        ["sbatch", "--parsable", "--nodes=3", "job.sbatch"],
        cwd=run_dir,
        env={**slurm.environment, "PATH": f"{tmp_path}:{slurm.environment['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    wait_for_checkpoints(slurm, run_dir, 3)
    first, lost = sorted(arenas(run_dir))

    # Agents of a run that recovers would wait for the other node, within the step.
    for node in (lost,) if more else (first, lost):
        for pid in processes(job_id, node):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(arenas(run_dir)[lost])
    state = slurm.wait_for_end(job_id)

    assert state == "COMPLETED", logs(run_dir)
    events = read_events(run_dir / "events.jsonl")
    assert {each.node for each in events} == set(arenas(run_dir)) != {first, lost}
    loaded = {each.rank: each for each in events if each.event == "checkpoint_loaded"}
    assert sorted(rank for rank in loaded if rank is not None) == [0, 1, 2, 3]
    assert {(each.step or 0) >= 20 for each in loaded.values()} == {True}
    check_same_bits(run_dir, tmp_path / "here")
    assert not any(path.exists() for path in arenas(run_dir).values())

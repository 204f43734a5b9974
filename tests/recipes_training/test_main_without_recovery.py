from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.ports import free_ports
from tests.recipes_training.jobs import make_job, write_job
from tests.recipes_training.workers import ROOT, rank_variables

STEPS = (2, 5)
NUM_BUCKETS = 1
"""Of the model's gradients."""
FOREIGN = (
    "resilience.checkpointless",
    "resilience.comm.gate",
    "resilience.inprocess.block",
    "resilience.tiered",
)
"""What recovery is made of; the loop, which is one for all jobs, imports the rest."""
WORKERS = """
import os, runpy, sys
import torch, torch.distributed
from transformers import LlamaForCausalLM
module = "tests.recipes_training.noting_worker"
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        options = [f"--job={folder}/job.json", f"--run-dir={folder}", "--node-name=node-0"]
        sys.argv = [module, *options]
        runpy.run_module(module, run_name="__main__")
    assert os.waitpid(child, 0)[1] == 0
"""


def test_worker_without_recovery_meets_nothing_of_it(tmp_path):
    """No thread, no module of recovery and no collective more than data parallel training needs.

    Both workers are forked from a process that has imported torch, and none of our modules.
    """
    folders = [tmp_path / str(number) for number in STEPS]
    for folder, number in zip(folders, STEPS, strict=True):
        write_job(folder, make_job(trainer={"max_steps": number, "save_checkpoint": False}))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **rank_variables(0, 1, free_ports(1)[0]),
    }

    command = [sys.executable, "-c", WORKERS, *map(str, folders)]
    subprocess.run(command, env=environment, check=True, timeout=100, cwd=ROOT)

    short, long = (json.loads((folder / "met-0.json").read_text()) for folder in folders)
    assert [name for name in long["modules"] if name.startswith(FOREIGN)] == []
    assert long["threads"] == ["MainThread"]
    # A step reduces its buckets, and the loss with the wish to stop.
    long["collectives"]["c10d.allreduce_.default"] -= (NUM_BUCKETS + 1) * (STEPS[1] - STEPS[0])
    assert long["collectives"] == short["collectives"]

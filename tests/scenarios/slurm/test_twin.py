"""The recipe of Llama 3 70B with a small model, on a real Slurm of four nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilience.events import read_events
from tests.recipes_training.workers import ROOT
from tests.scenarios.slurm.jobs import Slurm, submit_recipe, train_here
from tests.scenarios.slurm.test_run import check_same_bits, losses

pytest.importorskip("torch", reason="a worker needs torch")
NUM_STEPS = 12
TWIN = (
    "recipe=llama/llama3_70b_pretrain_checkpointless",
    "model=llama3_tiny",
    "model.num_layers=4",
    "instance=cpu",
    "resilience/tiered=run_folder",
    "data.tokenizer=bytes",
    "data.seq_length=64",
    "resources.memory_gib=null",
    "resources.hugepages_2mi_mib=0",
    "resources.shm_gib=1",
    # Its tensor ranks, stages and copies, two of each.
    "trainer.num_nodes=4",
    "trainer.num_devices=2",
    "trainer.tensor_parallel=2",
    "trainer.pipeline_parallel=2",
    "trainer.global_batch_size=16",
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.threads_per_worker=2",
    "trainer.optimizer.warmup_steps=4",
)
FAULTS = (
    "[{kind: exception, place: backward, step: 4, rank: 1},"
    " {kind: sigkill, place: within_update, step: 8, rank: 6}]"
)


@pytest.mark.slow
def test_the_twin_of_the_70b_recipe_trains_through_faults(slurm: Slurm, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    lines = [
        json.dumps({"text": path.read_text("utf-8")}) for path in ROOT.glob("recipes_training/*.py")
    ]
    samples.write_text("\n".join(lines), "utf-8")
    twin = (*TWIN, f"data.path={samples}")
    train_here(tmp_path / "here", *twin)
    run_dir = tmp_path / "there"
    faults = ("resilience/faults=default", f"resilience.faults.injected={FAULTS}")
    state = slurm.wait_for_end(submit_recipe(run_dir, *twin, *faults))
    assert state == "COMPLETED", "".join(path.read_text() for path in run_dir.rglob("*.log"))
    assert len(losses(tmp_path / "here")) == NUM_STEPS
    check_same_bits(run_dir, tmp_path / "here")
    events = read_events(run_dir / "events.jsonl")
    assert [each.step for each in events if each.event == "fault_injected"] == [4, 8]
    assert len({each.node for each in events if each.event == "worker_started"}) == 4
    assert not [each for each in events if each.event == "recovery_fallback"]

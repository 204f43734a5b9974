"""A recipe trained on a real Slurm has the bits of the same recipe trained on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.paths import shipped_folder
from resilience.events import read_events
from tests.launcher.command import launch
from tests.scenarios.slurm.jobs import Slurm, submit_recipe, train_here

pytest.importorskip("torch", reason="a worker needs torch")
RECIPE = ("recipe=llama/llama3_tiny_pretrain", "trainer.max_steps=10")


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, which every rank has to agree on."""
    found: dict[int, float] = {}
    for event in read_events(run_dir / "events.jsonl"):
        if event.event == "step" and event.step is not None:
            loss = found.setdefault(event.step, event.fields["loss"])
            assert event.fields["loss"] == loss
    return found


def weights(run_dir: Path) -> dict[str, bytes]:
    files = (run_dir / "checkpoint").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in files}


def check_same_bits(run_dir: Path, here: Path) -> None:
    """See that a run ended with the losses and the weights of another one."""
    assert losses(run_dir) == losses(here)
    assert weights(run_dir) == weights(here) != {}


def test_submitted_recipe_trains_to_the_same_bits_as_on_this_machine(slurm: Slurm, tmp_path: Path):
    train_here(tmp_path / "here", *RECIPE)
    job_id = submit_recipe(tmp_path / "there", *RECIPE)
    state = slurm.wait_for_end(job_id)

    logs = "".join(path.read_text() for path in (tmp_path / "there").rglob("*.log"))
    assert state == "COMPLETED", logs
    assert len(losses(tmp_path / "here")) == 10
    check_same_bits(tmp_path / "there", tmp_path / "here")


@pytest.mark.slow
def test_a_script_that_is_submitted_trains_and_tells_its_steps(slurm: Slurm, tmp_path: Path):
    recipe = (
        "recipe=script/torch_ddp",
        f"trainer.folder={shipped_folder()}",
        "trainer.max_steps=40",
    )
    run = tmp_path / "there"

    state = slurm.wait_for_end(submit_recipe(run, *recipe))

    logs = "".join(path.read_text() for path in run.rglob("*.log"))
    assert state == "COMPLETED", logs
    told = launch("status", str(run), folder=tmp_path).out
    assert "steps     40 of 40, loss " in told
    assert f"code      {shipped_folder()} at " in told
    assert (run / "torch_ddp.pt").is_file(), "in the run's folder"

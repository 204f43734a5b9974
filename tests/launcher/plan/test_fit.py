"""What surely does not fit is not submitted; what probably does not is noted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.paths import shipped_folder
from launcher.plan.devices import read_device
from launcher.plan.fit import check_fit, judge_node, misfits
from launcher.plan.plan import make_plan
from tests.launcher.command import launch, put, refuse
from tests.launcher.plan.worlds import LLAMA, job_of
from tests.launcher.shipped import TRAINED, shipped_job

SAYS_DAYS = r"# `plan` says ([\d.]+) days for all steps"
PATHS = (f"recipe={LLAMA}", "cluster=slurm", "instance=ml.g5.xlarge", "trainer.num_nodes=1",
         "trainer.num_devices=1", "trainer.precision=bf16", "resilience.tiered=null")  # fmt: skip
EIGHT_B = ("model=llama3_8b", "instance=ml.g5.48xlarge", "trainer.num_devices=8",
           "trainer.precision=bf16", "trainer.global_batch_size=32")  # fmt: skip
SHARDED = (*EIGHT_B, "trainer.sharding=full")


def test_what_surely_does_not_fit_is_refused_with_both_numbers() -> None:
    """8B needs 16 bytes a parameter, and one A10G has 24 GiB."""
    job = job_of(LLAMA, *EIGHT_B)

    with pytest.raises(RecipeError) as refused:
        check_fit(job)

    assert str(refused.value) == (
        "action 'submit': weights, gradients and optimizer take 120 GiB of each device, and a "
        "device of 'ml.g5.48xlarge' has 24 GiB; divide them over more ranks (trainer.sharding, "
        "trainer.num_nodes), or choose another instance; plan.force=true submits it all the same"
    )


def test_what_probably_does_not_fit_is_noted_and_submitted() -> None:
    job = job_of(LLAMA, *SHARDED, "trainer.micro_batch_size=4", "data.seq_length=512")

    (note,) = misfits(job)

    assert note.startswith("a device probably needs ")
    assert "of which 92% are for tensors" in note
    check_fit(job)


def test_a_node_that_is_too_small_is_noted() -> None:
    """The rules count what is asked for; the workers' own memory comes on top."""
    job = job_of(LLAMA, *SHARDED, "resources.shm_gib=768", "data.seq_length=16",
                 "model=llama3_tiny")  # fmt: skip

    fit = judge_node(job)

    assert fit.verdict == "probably does not fit"
    assert fit.reason == (
        "a node needs 776 GiB of memory, and 'ml.g5.48xlarge' has 768 GiB; `plan` shows each part"
    )
    assert misfits(job) == [fit.reason]


@pytest.mark.parametrize("recipe", TRAINED)
def test_a_shipped_recipe_fits_its_instance_and_its_limit_or_says_why_not(recipe: str) -> None:
    job = shipped_job(recipe, "slurm")
    device = read_device(job.instance)
    assert (device is None) == (job.instance.type == "cpu")
    plan = make_plan(job, device, 0.4)

    assert misfits(job) == []
    if plan.ends_in_time is False:
        (days,) = {days for each in _files_of(recipe) for days in re.findall(SAYS_DAYS, each)}
        assert float(days) == round(plan.time[-1].value, 1)


def _files_of(recipe: str) -> list[str]:
    """Return the text of a recipe's file and of those that it includes."""
    text = (shipped_folder() / "recipes" / f"{recipe}.yaml").read_text()
    included = re.findall(r"^  - (\w+/\w+)$", text, re.MULTILINE)
    return [text, *(found for each in included for found in _files_of(each))]


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch that takes whatever it is given."""
    program = put(tmp_path / "bin" / "sbatch", "#!/bin/sh\necho 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_submit_refuses_what_does_not_fit_before_it_writes(sbatch: Path) -> None:
    said = refuse(sbatch, *PATHS, "model=llama3_8b", "action=submit")

    assert said.startswith("action 'submit': weights, gradients and optimizer take 120 GiB")


def test_submit_takes_what_does_not_fit_by_force(sbatch: Path) -> None:
    ended = launch(*PATHS, "model=llama3_8b", "action=submit", "plan.force=true", folder=sbatch)

    assert ended.status == 0, ended.err
    assert "submitted job 7" in ended.out
    assert "note: weights, gradients and optimizer take 120 GiB" in ended.err


def test_an_instance_that_the_table_lacks_is_submitted_unchecked(sbatch: Path) -> None:
    (sbatch / "conf" / "instance").mkdir(parents=True)
    text = (
        "type: ours\naccelerator: gpu\nnum_devices: 1\nnum_efa: 0\nnum_vcpus: 9\nmemory_gib: 64\n"
    )
    (sbatch / "conf" / "instance" / "ours.yaml").write_text(text)
    words = [each.replace("ml.g5.xlarge", "ours") for each in PATHS]

    ended = launch(*words, "model=llama3_8b", "action=submit", folder=sbatch)

    assert ended.status == 0, ended.err
    assert "does not fit" not in ended.err


def test_rendering_notes_what_does_not_fit_and_keeps_the_digest(tmp_path: Path) -> None:
    ended = launch(*PATHS, "model=llama3_8b", folder=tmp_path)
    other = launch(*PATHS, "model=llama3_8b", "plan.mfu=0.3", "plan.force=true", "run.dir=other",
                   folder=tmp_path)  # fmt: skip

    assert ended.status == other.status == 0
    assert "note: weights, gradients and optimizer take 120 GiB" in ended.err
    (first,) = (tmp_path / "runs").glob("*/job.json")
    assert first.read_bytes() == (tmp_path / "other" / "job.json").read_bytes()
    assert "plan" not in json.loads(first.read_text())

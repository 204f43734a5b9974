"""What a recipe says reaches Slurm as the same text, whatever characters it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.clusters.sbatch_lines import option_line
from launcher.clusters.slurm import JOB_SCRIPT
from launcher.clusters.slurm_submit import submit_slurm
from launcher.errors import OutsideError
from tests.scenarios.slurm.jobs import Run, Slurm, slurm_job

HOSTILE = [
    """it's "so" called""",
    "$(touch pwned) `touch pwned` ${HOME} $HOME",
    "a # b #SBATCH --nodes=4",
    r"back\slash \" \' end\\",
    "*?[a-z]{b} ~ ! ; | & > < ( )",
    "--nodes=4 -N4 %j %x %%",
    "Gr\u00f6\u00dfe \u6f22\u5b57",
    "x" * 1024,
]


def comment_of_job(slurm: Slurm, script: Path, comment: str) -> str:
    """Return the comment that Slurm knows of a job whose script sets it and then its nodes."""
    lines = ["#!/bin/bash", option_line("comment", comment), option_line("nodes", "3"), "true"]
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    job_id = slurm.ask("sbatch", "--parsable", "--hold", str(script)).strip()
    found, nodes = slurm.ask("squeue", "--noheader", "--format=%k|%D", f"--jobs={job_id}").rsplit(
        "|", 1
    )
    slurm.ask("scancel", job_id)
    assert nodes.strip() == "3"
    return found


@pytest.mark.parametrize("comment", HOSTILE)
def test_option_value_arrives_as_it_was_written(slurm: Slurm, tmp_path: Path, comment: str):
    assert comment_of_job(slurm, tmp_path / "job.sh", comment) == comment
    assert not (tmp_path / "pwned").exists()


def test_options_of_the_recipe_reach_the_job(slurm: Slurm, submit: Callable[..., Run]):
    run = submit(
        name="options",
        time_limit="1-02:03:00",
        resources={"num_cpus": 6, "memory_gib": 12},
        instance={"accelerator": "gpu"},
        cluster={
            "partition": "main",
            "exclusive": False,
            "requeue": False,
            "exclude": "n4",
            "pre_script": "true\n#PBS -N wrong\n#BSUB -J wrong\n",
            "extra_options": {"begin": "now+1hour", "nice": "7", "spread-job": "true"},
        },
    )

    fields = {
        "JobName": "llama3-tiny-pretrain", "TimeLimit": "1-02:03:00", "NumNodes": "2-2",
        "CPUs/Task": "6", "MinMemoryNode": "12G", "TresPerNode": "gres:gpu:2", "Requeue": "0",
        "ExcNodeList": "n4", "Nice": "7", "OverSubscribe": "OK", "WorkDir": str(run.folder),
    }  # fmt: skip
    assert {name: slurm.field(run.job_id, name) for name in fields} == fields
    assert "wrong" not in slurm.ask("scontrol", "show", "job", run.job_id)


def test_refused_submission_has_the_words_of_sbatch(slurm: Slurm, tmp_path: Path):
    (tmp_path / JOB_SCRIPT).write_text("#!/bin/bash\n#SBATCH --partition=absent\ntrue\n")

    with pytest.raises(OutsideError, match="invalid partition specified: absent"):
        submit_slurm(tmp_path, slurm_job({}))

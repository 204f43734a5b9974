"""What the shell of each rendered script makes of a program's words."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.clusters.program import preloads, program_config, script_words
from launcher.job import Job
from launcher.job.workload import ScriptTrainer
from tests.launcher.script_job import script_job
from tests.launcher.shipped import rendered

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
ODD = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\", "*", "{node_rank}", "\n", "-x", "\xe9",
       "!", "#"]  # fmt: skip


def words_through_bash(words: str) -> list[str]:
    """Return what a program is given that bash starts with these words."""
    done = subprocess.run(
        ["bash", "-euc", f"printf '%s\\0' {words}"], capture_output=True, check=True, cwd="/",
        env={"LAUNCHER_PYTHON": "python"},
    )  # fmt: skip
    return done.stdout.decode().split("\0")[:-1]


def started(job: Job, kind: str) -> str:
    """Return what a rendered script starts on a node, as the shell reads it."""
    files = rendered(job)
    if kind == "job":
        documents = yaml.safe_load_all(files["manifest.yaml"])
        config = next(each for each in documents if each["kind"] == "ConfigMap")
        text: str = config["data"]["start.sh"]
    else:
        text = files["job.sbatch" if kind == "slurm" else "node-0.sh"]
    words = text.partition("resilience.agent ")[2]
    return re.split(r" -- (?:\\\n)?", words, maxsplit=1)[1].partition("\n}\n")[0]


@given(st.lists(TEXTS, max_size=5))
def test_a_program_gets_the_words_that_its_recipe_says(words: list[str]) -> None:
    trainer = script_job(arguments=words, python="/opt/my env/python").trainer
    assert isinstance(trainer, ScriptTrainer)

    given_words = words_through_bash(" ".join(script_words(trainer, "python")))

    assert given_words == ["/opt/my env/python", "examples/torch_ddp.py", *words]


@pytest.mark.parametrize("kind", ["local", "slurm", "job"])
def test_each_cluster_starts_the_program_with_its_words(kind: str) -> None:
    job = script_job(kind, arguments={"odd": ODD}, entry="-m train.main")

    assert words_through_bash(started(job, kind)) == ["python", "-m", "train.main", "--odd", *ODD]


@pytest.mark.parametrize(
    ("trainer", "executed", "begins"),
    [
        ({}, False, ["PY", "examples/torch_ddp.py"]),
        ({"entry": "-m a.b"}, False, ["PY", "-m", "a.b"]),
        ({"python": "/x/python"}, True, ["/x/python", "examples/torch_ddp.py"]),
        ({"entry": "accelerate"}, True, ["accelerate"]),
        ({"entry": "/opt/run.sh"}, True, ["/opt/run.sh"]),
    ],
)
def test_what_is_executed_and_what_is_forked(
    trainer: dict[str, Any], executed: bool, begins: list[str]
) -> None:
    job = script_job(**trainer)
    config = program_config(job)
    assert isinstance(job.trainer, ScriptTrainer)

    assert config
    assert config.executed is executed
    assert list(script_words(job.trainer, "PY"))[: len(begins)] == begins


OTHER: dict[str, Any] = {
    "num_nodes": 3, "num_devices": 1, "max_restarts": 5, "threads_per_worker": 2,
    "entry": "other.py", "arguments": {}, "argument_style": "key=value", "boolean_style": "value",
    "folder": "/other", "python": "/other/python", "processes_per_node": 3, "environment": "none",
    "progress": "lightning", "hang_deadline_s": None, "preload": ["numpy"],
}  # fmt: skip


def test_every_key_of_a_script_changes_a_text() -> None:
    """But for its number of steps, which is for the display."""

    def texts(**trainer: Any) -> dict[str, str]:
        job = script_job("slurm", **{"arguments": {"a": 1, "b": True}, **trainer})
        return {name: each.replace(job.digest(), "") for name, each in rendered(job).items()}

    before = texts()
    del before["job.json"]
    silent = [
        key for key, value in OTHER.items() if before.items() <= texts(**{key: value}).items()
    ]

    assert silent == []
    assert {*OTHER, "kind", "max_steps"} == set(ScriptTrainer.model_fields)


def test_agents_are_told_of_the_program() -> None:
    job = script_job(
        "slurm", environment="none", progress=["lightning", r"step (?P<step>\d+)"], preload=[],
        hang_deadline_s=None,
    )  # fmt: skip
    files = rendered(job)

    told = json.loads(files["node.json"])["agent"]

    assert told["program"] == {
        "executed": False,
        "folder": "/fsx/code",
        "alone": True,
        "progress": ["lightning", r"step (?P<step>\d+)"],
        "hang_deadline_s": None,
    }
    assert (told["workers_per_node"], told["shards"], told["stages"]) == (1, None, 1)
    assert preloads(job) == ("resilience",), "nothing of ours but the public package"
    assert "--warm=program" not in files["job.sbatch"]


def test_secrets_and_variables_are_there_as_for_ours() -> None:
    job = script_job("slurm")
    content = job.model_dump(mode="json", by_alias=True)
    content["env"] = {"WANDB_MODE": "offline"}
    content["cluster"]["secrets"] = {"HF_TOKEN": {}}

    text = rendered(Job.model_validate(content))["job.sbatch"]

    assert "export OMP_NUM_THREADS=1\n" in text
    assert "export WANDB_MODE=offline\n" in text
    assert "HF_TOKEN" in text
    assert shlex.quote("env") + ' LAUNCHER_RUN_DIR="$run_dir"' in " ".join(text.split(" \\\n"))

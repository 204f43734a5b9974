from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes_training.errors import CheckpointError, GroupError
from recipes_training.weights import export
from tests.cases import grid
from tests.recipes_training.groups import make_group
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job

SHARDINGS = [
    pytest.param("none", None, 2, id="ddp"),
    pytest.param("full", None, 2, id="full"),
    pytest.param("hybrid", 2, 4, id="hybrid"),
]
MODELS = [
    pytest.param(LLAMA, id="llama"),
    pytest.param({**LLAMA, "tie_embeddings": True}, id="llama-tied"),
    pytest.param(GPT_OSS, id="gpt-oss"),
]


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def _no_step(**trainer):
    """A step that changes nothing: what is written is what the run began with."""
    return {"max_steps": 1, "optimizer": {"lr": 1e-30, "min_lr": 0.0, "warmup_steps": 0}, **trainer}


@pytest.mark.parametrize(
    ("sharding", "num_replicas", "num_workers", "model"),
    grid(SHARDINGS, MODELS, fast={"full-llama-tied", "hybrid-gpt-oss"}),
)
def test_checkpoint_has_the_trained_bits(
    workers, tmp_path, sharding, num_replicas, num_workers, model
):
    layout = {"sharding": sharding, "num_replicas": num_replicas, "num_devices": num_workers}

    outcome = workers.run(
        make_job(model=model, trainer={**layout, "max_steps": 2}), tmp_path / "trained"
    )
    again = workers.run(
        make_job(
            model={**model, "weights": str(tmp_path / "trained/checkpoint")},
            trainer=_no_step(**layout),
        ),
        tmp_path / "again",
    )

    loaded = _load(outcome.folder / "checkpoint")
    parameters = {name: each.detach().numpy() for name, each in loaded.named_parameters()}
    assert {name: each.tobytes() for name, each in parameters.items()} == outcome.weights()
    assert {each.dtype for each in loaded.parameters()} == {torch.float32}
    assert loaded.config.architectures == [type(loaded).__name__]
    assert again.weights() == outcome.weights()
    assert not list(tmp_path.glob("*/checkpoint.*"))


def test_loaded_model_computes_what_was_trained(workers, tmp_path):
    """Weights, configuration and rotary frequencies fit: the loss goes on where it ended."""
    model = {**GPT_OSS, "router_aux_loss_coef": 0.0}
    job = make_job(model=model, trainer={"max_steps": 30, "optimizer": {"min_lr": 0.0}})
    outcome = workers.run(job, tmp_path / "trained")
    weights = str(outcome.folder / "checkpoint")

    again = workers.run(
        make_job(model={**model, "weights": weights}, trainer=_no_step()), tmp_path / "again"
    )

    loaded = _load(weights)
    text = torch.tensor([list(b"def __init__(self):\n    self.")])
    loss = loaded(input_ids=text, labels=text).loss.item()
    assert again.losses[0] < outcome.losses[0] - 0.5
    assert loss < outcome.losses[0] - 0.5


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_layout(workers, tmp_path):
    layouts = [
        {"sharding": "none", "num_devices": 1},
        {"sharding": "full", "num_devices": 4},
        {"sharding": "hybrid", "num_replicas": 2, "num_devices": 4},
    ]

    weights = [
        workers.run(make_job(trainer=_no_step(**layout)), tmp_path / str(number)).weights()
        for number, layout in enumerate(layouts)
    ]

    assert weights[0] == weights[1] == weights[2]


@pytest.mark.slow
def test_large_model_is_divided_over_files(workers, tmp_path):
    program = "tests.recipes_training.programs:write_small_files"
    job = make_job(trainer={"sharding": "full", "num_devices": 2, "max_steps": 2})
    whole = workers.run(job, tmp_path / "whole")

    outcome = workers.run(job, tmp_path / "divided", target=program)

    folder = outcome.folder / "checkpoint"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 3
    assert outcome.weights() == whole.weights()
    assert dict(_load(folder).named_parameters()).keys() == whole.weights().keys()
    resumed = make_job(model={"weights": str(folder)}, trainer=_no_step())
    assert workers.run(resumed, tmp_path / "resumed").weights() == whole.weights()


def test_new_checkpoint_takes_the_place_of_an_older_one(tmp_path):
    """Its files can be read as the umask says."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/older").touch()
    killed = export._open_draft(tmp_path / "checkpoint")
    (killed / "new/part").touch()
    of_others = [tmp_path / f"checkpoint.{end}" for end in ("older", "unfinished", "unfinished-1")]
    for each in of_others:
        each.mkdir()
        (each / "theirs").touch()

    write(tmp_path / "checkpoint", lambda _: torch.zeros(1))

    files = sorted((tmp_path / "checkpoint").iterdir())
    assert [path.name for path in files] == ["config.json", "model.safetensors"]
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}
    assert sorted(tmp_path.glob("checkpoint.*")) == of_others
    assert all((each / "theirs").exists() for each in of_others)


def test_an_older_checkpoint_that_has_lost_its_name_gets_it_back(tmp_path):
    """A process was killed between the two renames, and the next one fails."""
    path = tmp_path / "checkpoint"
    killed = export._open_draft(path)
    (killed / "older").mkdir()
    (killed / "older/model").touch()

    with pytest.raises(CheckpointError, match="disk full"):
        write(path, fail)

    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    assert (path / "model").exists()


def test_an_older_checkpoint_stays_where_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "model").touch()
    rename = Path.rename

    def refuse_new(own: Path, target: Path) -> Path:
        if own.name == "new":
            raise OSError("no more names")
        return rename(own, target)

    monkeypatch.setattr(Path, "rename", refuse_new)

    with pytest.raises(CheckpointError, match="no more names"):
        write(path, lambda _: torch.zeros(1))

    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    assert [each.name for each in path.iterdir()] == ["model"]


def test_writing_that_fails_leaves_the_older_checkpoint(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "older").touch()
    group = make_group()

    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint {path}: disk full"):
        write(path, fail, group)

    with pytest.raises(GroupError, match="disk full"):
        make_group(rank=1, store=group.store).follow(
            "checkpoint/model.safetensors", timedelta(seconds=10)
        )
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
    assert (path / "older").exists()


def fail(_: str) -> torch.Tensor:
    raise OSError("disk full")


def write(path, gather, group=None) -> None:
    config = export.make_config(make_job().model)
    group = group or make_group()
    export.write_model(path, sizes={"a": 4}, gather=gather, config=config, group=group)

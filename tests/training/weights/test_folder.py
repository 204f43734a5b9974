from __future__ import annotations

import functools
import json
import shlex
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.training.convert.packing import PACKABLE, write_packed
from tests.training.jobs import GPT_OSS, MEGATRON, TORCH, make_job
from tests.training.workers import Outcome, Workers
from training.weights import folder

QUIETLY = "tests.training.programs:train_quietly"


@pytest.fixture(scope="module")
def trained(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return workers.run(make_job(trainer={"max_steps": 1}), tmp_path_factory.mktemp("trained"))


@pytest.fixture(params=[TORCH, MEGATRON], ids=["torch", "megatron"])
def complain(request, workers, tmp_path):
    """Return what tells with which line a run does not begin with a folder of weights."""
    return functools.partial(_complaint, workers, tmp_path, request.param)


def _complaint(workers, folder, trainer, weights, model):
    job = make_job(model={**model, "weights": str(weights)}, trainer=trainer)
    outcome = workers.run(job, folder, target=QUIETLY, is_success_expected=False)
    assert outcome.statuses == [1]
    (line,) = outcome.log().splitlines()
    return line


def test_weights_of_other_dimensions_are_refused(complain, trained):
    weights = trained.folder / "checkpoint"

    line = complain(weights, {"num_layers": 3})

    assert line == (
        f"training: model.weights {weights} has num_hidden_layers 2, the job 3; "
        "set the job's model to that of the weights"
    )


def test_weights_of_another_rope_are_refused(complain, trained):
    line = complain(trained.folder / "checkpoint", {"rope_theta": 20000.0})

    assert "has rope_parameters" in line


def test_weights_of_another_architecture_are_refused(complain, trained):
    line = complain(trained.folder / "checkpoint", GPT_OSS)

    assert "is of architecture 'llama', model.architecture is 'gpt_oss'" in line


def test_folder_without_weights_is_refused(complain, tmp_path):
    line = complain(tmp_path / "missing", {})

    assert line.startswith(f"training: model.weights {tmp_path / 'missing'} has no usable config")


def test_folder_without_a_parameter_is_refused(complain, tmp_path, trained):
    weights = tmp_path / "weights"
    weights.mkdir()
    config = (trained.folder / "checkpoint/config.json").read_text()
    (weights / "config.json").write_text(config)
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))

    line = complain(weights, {})

    assert line == (
        f"training: model.weights {weights} has no parameter 'model.embed_tokens.weight'"
    )


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.json", "has no usable config: config.json: the whole file []"),
        ("model.safetensors.index.json", "has no safetensors: model.safetensors.index.json: the"),
    ],
)
def test_folder_with_a_list_for_an_object_is_refused(complain, tmp_path, trained, file, told):
    weights = tmp_path / "weights"
    shutil.copytree(trained.folder / "checkpoint", weights)
    (weights / file).write_text("[]")

    assert complain(weights, {}).startswith(f"training: model.weights {weights} {told}")


def test_packed_weights_are_refused_with_the_command_that_expands_them(complain, tmp_path):
    weights = tmp_path / "packed weights"
    write_packed(weights)

    line = complain(weights, PACKABLE)

    command = shlex.join(["python", "-m", "training.convert", str(weights), f"{weights}-plain"])
    assert line == (
        f"training: model.weights {weights} is quantised (mxfp4), and training needs plain "
        f"weights; expand them with `{command}` and set model.weights to {weights}-plain"
    )


def test_weights_of_another_packing_are_refused(complain, tmp_path):
    write_packed(tmp_path / "packed", method="fp8")

    line = complain(tmp_path / "packed", PACKABLE)

    assert line.endswith("needs plain weights; training.convert expands mxfp4 alone")


def test_weights_of_another_shape_are_refused(complain, tmp_path, trained):
    """The config says otherwise than the file."""
    weights = tmp_path / "weights"
    shutil.copytree(trained.folder / "checkpoint", weights)
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))

    line = complain(weights, {"vocab_size": 300})

    assert line == (
        f"training: 'model.embed_tokens.weight' in {weights / 'model.safetensors'} has the shape "
        "(259, 32), the model (300, 32)"
    )


def test_a_file_is_opened_once_for_many_parts_and_anew_after_many_bytes(monkeypatch, tmp_path):
    whole = torch.arange(4096, dtype=torch.float32).view(64, 64)
    for number in range(2):
        save_file({f"{number}{name}": whole + number for name in "ab"}, tmp_path / f"{number}.st")
    index = {
        "weight_map": {f"{number}{name}": f"{number}.st" for number in range(2) for name in "ab"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = []

    def note(path, **options):
        opened.append(path.name)
        return safe_open(path, **options)

    monkeypatch.setattr(folder, "safe_open", note)

    def read_all():
        opened.clear()
        weights = folder.WeightsFolder(tmp_path)
        for name in index["weight_map"]:
            rows = [weights.read(name, (64, 64), (slice(row, row + 1),)) for row in range(64)]
            assert torch.equal(torch.cat(rows), whole + int(name[0]))
        return opened

    assert read_all() == ["0.st", "1.st"]
    monkeypatch.setattr(folder, "_MAPPED_MAX", 4095)  # 16 rows of 64 values are 4096 bytes
    assert read_all() == ["0.st"] * 8 + ["1.st"] * 8

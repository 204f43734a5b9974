from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from launcher.job.parameters import shapes
from recipes_training.errors import WeightsError
from recipes_training.weights import folder
from recipes_training.weights.export import make_config
from recipes_training.weights.folder import check_weights, open_weights
from tests.recipes_training.convert.packing import PACKABLE, write_packed
from tests.recipes_training.jobs import GPT_OSS, MEGATRON, TORCH, make_job

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
QUIETLY = "tests.recipes_training.programs:train_quietly"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of the model of the tests' jobs."""
    model = make_job().model
    made = tmp_path / "weights"
    make_config(model).save_pretrained(made)
    tensors = {name: torch.zeros(shape) for name, shape in shapes(model).items()}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def complaint(weights: Path, model: dict[str, Any]) -> str:
    """Return why a run of the model does not begin with a folder of weights."""
    with pytest.raises(WeightsError) as refused:
        check_weights(weights, make_job(model=model).model)
    return str(refused.value)


@pytest.mark.parametrize("trainer", [TORCH, MEGATRON], ids=["torch", "megatron"])
def test_weights_of_another_model_are_refused_in_one_line(workers, tmp_path, weights, trainer):
    job = make_job(model={"num_layers": 3, "weights": str(weights)}, trainer=trainer)

    outcome = workers.run(job, tmp_path / "run", target=QUIETLY, is_success_expected=False)

    assert outcome.statuses == [1]
    assert outcome.log() == (
        f"recipes_training: model.weights {weights} has num_hidden_layers 2, the job 3; "
        "set the job's model to that of the weights\n"
    )


def test_parameter_of_another_shape_or_none_is_named(weights):
    model = make_job().model

    def read() -> str:
        with pytest.raises(WeightsError) as refused:
            open_weights(weights, model).read(EMBEDDING, (300, 32), (slice(0, 1),))
        return str(refused.value)

    path = weights / "model.safetensors"
    assert read() == f"{EMBEDDING!r} in {path} has the shape (259, 32), the model (300, 32)"
    path.unlink()
    (weights / INDEX).write_text('{"weight_map": {}}')
    assert read() == f"model.weights {weights} has no parameter {EMBEDDING!r}"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"rope_theta": 20000.0}, "has rope_parameters"),
        (GPT_OSS, "is of architecture 'llama', model.architecture is 'gpt_oss'"),
    ],
)
def test_weights_that_compute_something_else_are_refused(weights, model, told):
    assert told in complaint(weights, model)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", None, "has no usable config"),
        ("config.json", "[]", "has no usable config: config.json: the whole file []"),
        (SINGLE, "{", f"has no usable {SINGLE}: Error while "),
        (INDEX, "[]", f"has no safetensors: {INDEX}: the"),
        (INDEX, "{", f"has no safetensors: {INDEX}: the whole file: Invalid JSON: "),
        (INDEX, "{}", f"has no safetensors: {INDEX}: weight_map: Field required"),
        (INDEX, '{"weight_map": {"a": 1}}', f"has no safetensors: {INDEX}: weight_map.a 1: Input "),
    ],
)
def test_folder_that_lacks_something_is_refused(weights, file, content, told):
    (weights / file).unlink(missing_ok=True)
    if content:
        (weights / file).write_text(content)

    assert complaint(weights, {}).startswith(f"model.weights {weights} {told}")


def test_packed_weights_are_refused_with_the_command_that_expands_them(tmp_path):
    """And without one where they are packed otherwise."""
    packed, other = tmp_path / "packed weights", tmp_path / "other"
    write_packed(packed)
    write_packed(other, method="fp8")

    command = shlex.join(
        ["python", "-m", "recipes_training.convert", str(packed), f"{packed}-plain"]
    )
    assert complaint(packed, PACKABLE) == (
        f"model.weights {packed} is quantised (mxfp4), and training needs plain "
        f"weights; expand them with `{command}` and set model.weights to {packed}-plain"
    )
    assert complaint(other, PACKABLE).endswith(
        "needs plain weights; recipes_training.convert expands mxfp4 alone"
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

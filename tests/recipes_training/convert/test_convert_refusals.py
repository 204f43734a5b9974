"""What cannot be converted is told in one line, and nothing is left of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from recipes_training.convert.__main__ import main
from tests.disks import files_of_at_most
from tests.recipes_training.convert.packing import write_packed

_UP_PROJ = "model.layers.1.mlp.experts.gate_up_proj"

Convert = Callable[[], tuple[int, str]]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "packed"
    write_packed(folder)
    return folder


@pytest.fixture
def convert(packed: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Return what converts, and tells the status and the only line on stderr."""

    plain = packed.with_name("plain")

    def run(source: Path = packed, target: Path = plain) -> tuple[int, str]:
        before = set(packed.parent.iterdir())
        status = main([str(source), str(target)])
        (line,) = capsys.readouterr().err.splitlines()
        assert set(packed.parent.iterdir()) == before
        return status, line.removeprefix("recipes_training.convert: ")

    return run


@pytest.mark.parametrize("make", [Path.mkdir, lambda plain: plain.symlink_to("nowhere")])
def test_a_target_that_exists_is_left_alone(convert, packed, make):
    plain = packed.with_name("plain")
    make(plain)

    assert convert() == (2, f"TARGET {plain} exists; name a folder that does not")


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda file: file.symlink_to("nowhere")])
def test_a_target_below_what_is_no_folder_is_told(convert, packed, make):
    below = packed.with_name("file")
    make(below)

    told = f"cannot write {below / 'plain'}: [Errno 17] File exists: '{below}'"
    assert convert(target=below / "plain") == (1, told)


def test_a_target_that_appears_meanwhile_is_left_alone(packed, monkeypatch, capsys):
    plain = packed.with_name("plain")
    save_config = GptOssConfig.save_pretrained

    def save_and_meet(config: GptOssConfig, folder: Path) -> None:
        save_config(config, folder)
        plain.mkdir()
        (plain / "theirs").touch()

    monkeypatch.setattr(GptOssConfig, "save_pretrained", save_and_meet)

    assert main([str(packed), str(plain)]) == 1

    told = f"recipes_training.convert: {plain} has come to be there meanwhile, and is left alone\n"
    assert capsys.readouterr().err == told
    assert [each.name for each in plain.iterdir()] == ["theirs"]
    assert sorted(each.name for each in packed.parent.iterdir()) == ["packed", "plain"]


def test_a_source_that_is_none_is_refused(convert, packed, tmp_path):
    assert convert(tmp_path / "none") == (2, f"SOURCE {tmp_path / 'none'} is no folder")
    config = packed / "config.json"
    config.write_text(config.read_text().replace("mxfp4", "fp8"))
    assert convert() == (2, f"{packed} is quantised as 'fp8'; allowed: 'mxfp4'")

    config.unlink()

    neither = "has neither a config.json, as weights have, nor a job.json, as runs have"
    assert convert() == (2, f"SOURCE {packed} {neither}")


def test_plain_weights_are_refused(convert, packed):
    plain = packed.with_name("plain")
    assert main([str(packed), str(plain)]) == 0

    status, line = convert(plain, plain.with_name("again"))

    assert (status, line) == (2, f"{plain} has plain weights already; set model.weights to it")


_NO_CAUSAL = ", and transformers makes no causal language model of its config: "


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"quantization_config": "mxfp4"},
            "no usable config: config.json: quantization_config 'mxfp4': Input should be",
        ),
        (
            {"num_hidden_layers": "two"},
            "no usable config: Validation error for field 'num_hidden_layers': TypeError: ",
        ),
        ({"dtype": "float17"}, "no usable config: module 'torch' has no attribute 'float17'"),
        ({"model_type": ["gpt_oss"]}, "no usable config: unhashable type: 'list'"),
        ({"model_type": "other"}, "no usable config: "),
        (
            {"model_type": "clip"},
            f"model_type 'clip'{_NO_CAUSAL}ValueError: Unrecognized configuration class ",
        ),
        ({"num_attention_heads": 0}, f"model_type 'gpt_oss'{_NO_CAUSAL}ZeroDivisionError: "),
    ],
)
def test_a_value_of_the_config_that_is_none_is_told(convert, packed, values, told):
    path = packed / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    status, line = convert()

    assert status == 1
    assert line.startswith(f"the folder {packed} has {told}")
    assert len(line) < 500


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("lm_head.weight", None, "has no parameter 'lm_head.weight'"),
        (f"{_UP_PROJ}_blocks", None, f"has no parameter {_UP_PROJ!r}"),
        (f"{_UP_PROJ}_scales", None, f"has no parameter '{_UP_PROJ}_scales'"),
        (
            "model.layers.0.mlp.shared.weight",
            torch.ones(3),
            "has model.layers.0.mlp.shared.weight, which the model does not have",
        ),
        # Nor may one be there both plain and packed.
        (
            _UP_PROJ,
            torch.ones(3),
            f"has {_UP_PROJ}_blocks, {_UP_PROJ}_scales, which the model does not have",
        ),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(convert, packed, name, changed, told):
    """As is one that is missing."""
    change_tensor(packed, name, changed)

    assert convert() == (1, f"the folder {packed} {told}")


def change_tensor(folder: Path, name: str, changed: torch.Tensor | None) -> None:
    """Replace a tensor, or add it, or leave it out."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), name: changed}
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, path, metadata={"format": "pt"})


def test_a_disk_without_room_leaves_nothing(convert, packed):
    with files_of_at_most(50_000):
        status, line = convert()

    assert status == 1
    assert line.startswith(f"cannot write the checkpoint {packed.with_name('plain')}: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "the following arguments are required: SOURCE, TARGET"),
        (("a", "b", "--dtype=fp16"), "'fp16' (choose from"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line

"""A run's checkpoint becomes the weights that the run has exported, whatever its layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from launcher.job import Job
from recipes_training.convert.__main__ import main
from tests.cases import slow
from tests.recipes_training.jobs import GPT_OSS, LLAMA, MEGATRON, TORCH, make_job, write_job
from tests.recipes_training.workers import Outcome, Workers
from tests.resilience.tiered.daemons import Daemon
from tests.scenarios.tiered.runs import folder_store, tiered

_STORE = folder_store("checkpoints", every_n_steps=1, waiting_max=8)
# Tensor ranks divide the vocabulary.
_LLAMA = {**LLAMA, "vocab_size": 260}
_GPT_OSS = {**GPT_OSS, "vocab_size": 260}
_TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
_MEGATRON = {**MEGATRON, "num_devices": 2, "max_steps": 3}
_TORCH = {**TORCH, "num_devices": 2, "max_steps": 3}
QUIETLY = "tests.recipes_training.programs:train_quietly"


def stored_job(values: dict[str, Any], trainer: dict[str, Any], **settings: Any) -> Job:
    return make_job(
        model=values,
        trainer=trainer,
        resilience={"tiered": tiered(every_n_steps=1, store=_STORE, **settings)},
    )


def run(workers: Workers, folder: Path, job: Job) -> Outcome:
    """Train with a daemon that keeps every step in the run's folder."""
    words = ("--store", f"folder:{folder / 'checkpoints'}", "--store-every-n-steps", "1")
    with Daemon(folder=folder / "arena", options=words).start() as daemon:
        variables = {"MEMORYD_DIR": str(daemon.folder)}
        outcome = workers.run(job, folder, target=QUIETLY, variables=variables)
        assert daemon.end() == 0
    return outcome


@pytest.mark.parametrize(
    ("values", "trainer"),
    [
        pytest.param(
            _GPT_OSS, {**_MEGATRON, **_TENSOR, "expert_parallel": 2}, id="gpt-oss-experts"
        ),
        slow(_GPT_OSS, {**_MEGATRON, **_TENSOR, "num_devices": 4}, id="gpt-oss-tensor"),
        slow(_LLAMA, {**_MEGATRON, **_TENSOR, "num_devices": 4}, id="llama-tensor"),
        slow(_LLAMA, {**_MEGATRON, "pipeline_parallel": 2, "num_devices": 4}, id="llama-pipeline"),
        slow(_LLAMA, {**_MEGATRON, "precision": "bf16"}, id="llama-bf16"),
        slow(_LLAMA, {**_TORCH, "sharding": "full"}, id="torch"),
    ],
)
def test_a_checkpoint_becomes_what_the_run_has_exported(
    workers: Workers, tmp_path: Path, values: dict[str, Any], trainer: dict[str, Any]
) -> None:
    outcome = run(workers, tmp_path, stored_job(values, trainer))

    assert main([str(tmp_path), str(tmp_path / "plain")]) == 0

    assert load_bytes(tmp_path / "plain") == outcome.weights()
    assert main([str(tmp_path), str(tmp_path / "before"), "--step=2"]) == 0
    assert load_bytes(tmp_path / "before") != outcome.weights()


def test_a_checkpoint_that_does_not_make_up_a_tensor_is_refused(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {**_MEGATRON, "num_devices": 1, "max_steps": 1}
    run(workers, tmp_path, stored_job(_GPT_OSS, trainer, namespace="named"))
    larger = {**_GPT_OSS, "num_experts": 8}
    write_job(tmp_path, stored_job(larger, trainer, namespace="named"))

    assert main([str(tmp_path), str(tmp_path / "plain")]) == 1

    (line,) = capsys.readouterr().err.splitlines()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert line.endswith(f" has 12,288 of the 24,576 values of {name!r}")
    assert not list(tmp_path.glob("plain*"))


@pytest.mark.parametrize(
    ("trainer", "models"),
    [
        pytest.param(
            _TORCH,
            {
                "has model.layers.1.": {"num_layers": 1},
                # As many values in another shape.
                "has parameter/": {"hidden_size": 16, "vocab_size": 520},
            },
            id="torch",
        ),
        slow(
            {**_MEGATRON, "num_devices": 1},
            {"has model.layers.1.": {"num_layers": 1}},
            id="megatron",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    workers: Workers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trainer: dict[str, Any],
    models: dict[str, dict[str, Any]],
) -> None:
    settings = {**trainer, "max_steps": 1}
    run(workers, tmp_path, stored_job(_LLAMA, settings, namespace="named"))
    for told, model in models.items():
        write_job(tmp_path, stored_job({**_LLAMA, **model}, settings, namespace="named"))

        assert main([str(tmp_path), str(tmp_path / "plain")]) == 1

        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
        assert "the run's model" in line
        assert not list(tmp_path.glob("plain*"))


def load_bytes(folder: Path) -> dict[str, bytes]:
    import torch

    tensors = load_file(folder / "model.safetensors")
    return {name: each.view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}


def test_what_a_run_has_not_is_told(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(*words: str) -> tuple[int, str]:
        status = main([str(tmp_path), str(tmp_path / "plain"), *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert not list(tmp_path.glob("plain*"))
        return status, line.removeprefix("recipes_training.convert: ")

    write_job(tmp_path, make_job())
    keeps_none = f"the run in {tmp_path} keeps no checkpoints in a store (resilience.tiered.store)"
    assert convert() == (2, keeps_none)

    job = stored_job(LLAMA, _TORCH)
    write_job(tmp_path, job)
    status, line = convert()
    assert status == 1
    assert line.endswith(f"in folder:{tmp_path / 'checkpoints'} has no whole step")

    run(workers, tmp_path, job)
    status, line = convert("--step=7")
    assert status == 2
    assert "has no step 7, but 3, 2, 1" in line

    def damage(step: int) -> None:
        (path,) = tmp_path.rglob(f"steps/{step:012}-*/0.*.json")
        path.write_text("{}")

    damage(2)
    status, line = convert("--step=2")
    assert (status, " is damaged: " in line) == (1, True)
    damage(3)
    assert main([str(tmp_path), str(tmp_path / "older")]) == 0
    told = "recipes_training.convert: step 3 is damaged, and step 1 is the newest that is whole: "
    assert told in capsys.readouterr().err
    assert main([str(tmp_path), str(tmp_path / "named"), "--step=1"]) == 0

    for data in tmp_path.glob("checkpoints/*/data/*"):
        content = bytearray(data.read_bytes())
        content[1000] ^= 1
        data.write_bytes(content)
    for path in (tmp_path / "older", tmp_path / "named"):
        shutil.rmtree(path)
    status, line = convert("--step=1")
    assert status == 1
    assert "its bytes are not what their checksums say" in line

    (tmp_path / "job.json").write_text("{}")
    status, line = convert()
    assert status == 2
    assert line.startswith(f"{tmp_path / 'job.json'} is no job of this version: ")

from __future__ import annotations

import json

import pytest

from tests.training.jobs import GPT_OSS, make_job
from tests.training.workers import Outcome, Workers


@pytest.fixture(scope="module")
def trained(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return workers.run(make_job(trainer={"max_steps": 1}), tmp_path_factory.mktemp("trained"))


def _complaint(workers, folder, weights, model):
    job = make_job(model={**model, "weights": str(weights)})
    outcome = workers.run(job, folder, is_success_expected=False)
    assert outcome.statuses == [1]
    (line,) = outcome.log().splitlines()
    return line


def test_weights_of_other_dimensions_are_refused(workers, tmp_path, trained):
    weights = trained.folder / "checkpoint"

    line = _complaint(workers, tmp_path, weights, {"num_layers": 3})

    assert line == (
        f"training: model.weights {weights} has num_hidden_layers 2, the job 3; "
        "set the job's model to that of the weights"
    )


def test_weights_of_another_rope_are_refused(workers, tmp_path, trained):
    line = _complaint(workers, tmp_path, trained.folder / "checkpoint", {"rope_theta": 20000.0})

    assert "has rope_parameters" in line


def test_weights_of_another_architecture_are_refused(workers, tmp_path, trained):
    line = _complaint(workers, tmp_path, trained.folder / "checkpoint", GPT_OSS)

    assert "is of architecture 'llama', model.architecture is 'gpt_oss'" in line


def test_folder_without_weights_is_refused(workers, tmp_path):
    line = _complaint(workers, tmp_path, tmp_path / "missing", {})

    assert line.startswith(f"training: model.weights {tmp_path / 'missing'} has no usable config")


def test_folder_without_a_parameter_is_refused(workers, tmp_path, trained):
    weights = tmp_path / "weights"
    weights.mkdir()
    config = (trained.folder / "checkpoint/config.json").read_text()
    (weights / "config.json").write_text(config)
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))

    line = _complaint(workers, tmp_path, weights, {})

    assert line == (
        f"training: model.weights {weights} has no parameter 'model.embed_tokens.weight'"
    )

from __future__ import annotations

import json

import pytest
import torch

from resilience.state.view import NamedTensor
from tests.training.groups import make_group
from training.errors import CheckpointError
from training.torch_trainer.epoch_checkpoint import EpochCheckpoint, ends_epoch


class SmallState:
    """A StateView of two tensors."""

    replica = 0
    shard = ""

    def __init__(self, value: float) -> None:
        self.values = [torch.full((3, 2), value), torch.tensor(value), torch.empty(0)]
        self.rest = {"lr": value}

    def tensors(self):
        return [NamedTensor(name=f"tensor/{n}", tensor=each) for n, each in enumerate(self.values)]

    def read_rest(self):
        return self.rest

    def write_rest(self, rest):
        self.rest = dict(rest)


def fine() -> None:
    """The state is what its last update left."""


@pytest.fixture
def group():
    return make_group(world_size=1)


@pytest.fixture
def write(tmp_path, group):
    def write_state(value: float, step: int, key: str = "job") -> bool:
        checkpoint = EpochCheckpoint(tmp_path, SmallState(value), key=key)
        return checkpoint.write(step, {"last": step}, group, fine)

    return write_state


@pytest.mark.parametrize(
    ("num_samples", "steps"),
    [
        pytest.param(16, [2, 4, 6, 8], id="whole-steps"),
        pytest.param(20, [3, 5, 8], id="within-a-step"),
        pytest.param(8, list(range(1, 10)), id="each-step"),
        pytest.param(5, list(range(1, 10)), id="twice-a-step"),
        pytest.param(73, [], id="not-yet"),
    ],
)
def test_epoch_ends_with_the_step_that_takes_its_last_sample(num_samples, steps):
    found = [n for n in range(10) if ends_epoch(n, global_batch_size=8, num_samples=num_samples)]

    assert found == steps


def test_newest_state_comes_back_with_its_rest(tmp_path, group, write):
    write(1.5, step=2)
    write(2.5, step=10)
    state = SmallState(0.0)

    found = EpochCheckpoint(tmp_path, state, key="job").read(group)

    assert found == (10, {"last": 10})
    assert [each.tolist() for each in state.values] == [[[2.5, 2.5]] * 3, 2.5, []]
    assert state.rest == {"lr": 2.5}
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-00000010"]


def test_state_is_written_once(tmp_path, write):
    assert write(1.5, step=2)
    assert not write(1.5, step=2)


@pytest.mark.parametrize("key", ["job", "other"])
def test_state_of_another_job_or_without_its_manifest_counts_as_none(tmp_path, group, write, key):
    write(1.5, step=2)
    if key == "job":
        (tmp_path / "state/step-00000002/manifest.json").unlink()

    assert EpochCheckpoint(tmp_path, SmallState(0.0), key=key).read(group) is None


def test_without_a_state_there_is_none(tmp_path, group):
    assert EpochCheckpoint(tmp_path, SmallState(0.0), key="job").read(group) is None


def test_changed_state_is_not_written(tmp_path, group):
    def changed() -> None:
        raise ValueError("changed")

    with pytest.raises(ValueError, match="changed"):
        EpochCheckpoint(tmp_path, SmallState(1.0), key="job").write(2, {}, group, changed)

    assert not (tmp_path / "state").exists()


def test_broken_shard_is_named(tmp_path, group, write):
    write(1.5, step=2)
    path = tmp_path / "state/step-00000002/shard-0.safetensors"
    path.write_bytes(path.read_bytes()[:50])

    with pytest.raises(CheckpointError, match=f"cannot read the state in {path}"):
        EpochCheckpoint(tmp_path, SmallState(0.0), key="job").read(group)


def test_manifest_says_which_generation_wrote(tmp_path, write):
    write(1.5, step=2)

    manifest = json.loads((tmp_path / "state/step-00000002/manifest.json").read_text())

    assert manifest == {"step": 2, "generation": 0, "key": "job"}

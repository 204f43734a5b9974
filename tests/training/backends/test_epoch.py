from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from resilience.state.view import NamedTensor
from tests.training.groups import make_group
from training.backends.epoch import EpochCheckpoint, ends_epoch
from training.errors import CheckpointError


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


def write_on_both(folder, step, *, spoil=lambda rank: None):
    """Write as two workers who hold a shard each; returns what each of them got."""
    store = HashStore()

    def write_as(rank):
        state = SmallState(float(step))
        state.shard = str(rank)
        checkpoint = EpochCheckpoint(folder, state, key="job")
        spoil(rank)
        try:
            return checkpoint.write(step, {}, make_group(rank, store=store), fine)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(write_as, range(2)))


def take_name(path, *, rank):
    """Have one worker put a folder where it is about to write a file."""
    return lambda each: path.mkdir(parents=True) if each == rank else None


def test_shard_that_cannot_be_written_is_told_to_all_and_leaves_the_older_state(tmp_path):
    assert write_on_both(tmp_path, 2) == [True, True]

    path = tmp_path / "state/step-00000004/shard-1.safetensors"

    told = write_on_both(tmp_path, 4, spoil=take_name(path.with_suffix(".draft"), rank=1))

    assert told[0] == told[1]
    assert told[0].startswith(f"cannot write the state {path}: [Errno 21] Is a directory")
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000002"]
    assert write_on_both(tmp_path, 6) == [True, True]


def test_manifest_that_cannot_be_written_leaves_the_older_state(tmp_path):
    assert write_on_both(tmp_path, 2) == [True, True]

    folder = tmp_path / "state/step-00000004"

    told = write_on_both(tmp_path, 4, spoil=take_name(folder / "manifest.json.draft", rank=0))

    assert told[0].startswith(f"cannot write the state {folder}")
    assert told[1] is True
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000002"]


def test_removal_that_ends_midway_leaves_no_state_that_counts(tmp_path, write, monkeypatch):
    write(1.5, step=2)

    def die(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        EpochCheckpoint(tmp_path, SmallState(0.0), key="job").remove()

    assert [each.name for each in (tmp_path / "state/step-00000002").iterdir()] == [
        "shard-0.safetensors"
    ]

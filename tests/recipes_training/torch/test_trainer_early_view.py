"""Memory for a rank's state is made before the process has a rank, where any rank has the same."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from recipes_training.recovery import reserve_room
from recipes_training.torch.trainer import TorchTrainer
from resilience.state.shared import SharedState
from tests.recipes_training.groups import Quiet
from tests.recipes_training.jobs import make_job
from tests.resilience.state.nodes import opened_state_files


@pytest.fixture
def files() -> Iterator[list[int]]:
    with opened_state_files(2) as made:
        yield made


def test_under_ddp_each_place_of_the_node_has_its_memory_with_the_trainer(files: list[int]) -> None:
    job, shared = make_job(), SharedState(files)

    trainer = reserve_room(TorchTrainer, shared)(job, Quiet(), is_restartable=True)

    assert trainer.early_view is not None
    names = [each.name for each in trainer.early_view.tensors()]
    assert sum(name.endswith("/exp_avg_sq") for name in names) == len(names) // 4
    num_bytes = sum(each.tensor.nbytes for each in trainer.early_view.tensors())
    for each in files:
        assert os.fstat(each).st_blocks * 512 >= num_bytes
    assert shared.local_rank is None
    assert shared.adopt(trainer.early_view, 1, is_overwritten=True)


def test_a_shard_has_no_memory_before_its_rank(files: list[int]) -> None:
    job = make_job(trainer={"sharding": "full", "num_devices": 2})

    trainer = reserve_room(TorchTrainer, SharedState(files))(job, Quiet(), is_restartable=True)

    assert trainer.early_view is None
    assert [os.fstat(each).st_size for each in files] == [0, 0]

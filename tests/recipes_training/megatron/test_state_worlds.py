"""What Megatron's ranks have saved is the same, bit for bit, on another number of data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.cases import slow
from tests.ports import free_ports
from tests.recipes_training.jobs import MEGATRON, make_job
from tests.recipes_training.megatron.runs import GPT_OSS, LLAMA
from tests.recipes_training.megatron.worlds import (
    Found,
    adapted_to_a_gpu,
    adopt_state,
    count_overlapping,
    fork_worlds,
    load_saved,
    train_and_save,
)
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.daemons import Daemon

TIMEOUT_S = 240
"""For all worlds of a case, one after the other."""
_TRAINER = {**MEGATRON, "global_batch_size": 12, "micro_batch_size": 1}


@dataclass(frozen=True)
class Worlds:
    """What ranks of several worlds came to, in the order of their ranks."""

    saved: list[Found]
    """Of two copies, each of two parts of the data-parallel state."""
    loaded: dict[int, list[Found]]
    """Of one copy, by the number of ranks: of 1, 2, 3 and 4 parts."""
    adopted: list[bool]
    num_overlapping: list[list[int]]
    """Of the data ranks of one copy, reductions in the midst of each step."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(({}, 1), id="sharded"),
        slow(({"precision": "bf16"}, 1), id="bf16"),
        slow(({"tensor_parallel": 2}, 2), id="tensor"),
        slow(({"pipeline_parallel": 2}, 2), id="pipeline"),
        slow(({"expert_parallel": 2, "global_batch_size": 24}, 2), id="experts"),
    ],
)
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    values, group_size = request.param
    sizes = [group_size * each for each in (1, 2, 3, 4)]
    folder = tmp_path_factory.mktemp("worlds")
    with Daemon(folder=folder / "arena", budget_mib=64).start() as daemon:

        def world(target: Any, size: int, num_replicas: int = 1) -> Any:
            own = {**_TRAINER, **values, "num_devices": size, "num_replicas": num_replicas}
            job = make_job(trainer=own, model=GPT_OSS if "expert_parallel" in values else LLAMA)
            return target, size, (job, free_ports(1)[0], str(daemon.socket_path))

        asked = [
            world(train_and_save, sizes[-1], 2),
            *(world(load_saved, each) for each in sizes),
            world(adopt_state, sizes[0]),
            world(count_overlapping, sizes[1]),
        ]
        ((saved, *loaded, adopted, overlapping),) = run_ranks(
            fork_worlds, 1, asked, timeout_s=TIMEOUT_S
        )
    return Worlds(saved, dict(zip(sizes, loaded, strict=True)), adopted, overlapping)


def join(ranks: list[Found]) -> dict[str, bytes]:
    """Return whole tensors; parts that several ranks have are the same bits."""
    parts: dict[str, dict[int, bytes]] = {}
    for rank in ranks:
        for name, (begin, part) in rank.parts.items():
            assert parts.setdefault(name, {}).setdefault(begin, part) == part
    return {name: b"".join(each[begin] for begin in sorted(each)) for name, each in parts.items()}


def test_any_number_of_data_ranks_loads_the_same_state(worlds: Worlds) -> None:
    expected = join(worlds.saved)

    for size, found in worlds.loaded.items():
        assert join(found) == expected, f"{size} ranks"
    # What fills Megatron's buffers up is no part of it.
    assert any(each.num_padded for found in worlds.loaded.values() for each in found)


def test_the_model_is_made_of_what_was_loaded(worlds: Worlds) -> None:
    expected = pytest.approx(worlds.saved[0].loss, rel=1e-5)

    for found in worlds.loaded.values():
        assert found[0].loss == expected


def test_the_state_moves_into_shared_memory_and_is_trained_there(worlds: Worlds) -> None:
    """So the next process of a rank copies it from a rank of its node, with none between."""
    assert all(worlds.adopted)


def test_reductions_overlap_with_the_backward_pass_but_in_a_generations_first_step(
    worlds: Worlds,
) -> None:
    """Megatron learns in a first step what it waits for. All ranks have it at the same time."""
    for first, second, after_a_fault, last in worlds.num_overlapping:
        assert first == after_a_fault == 0
        assert second == last > 0


def test_a_gpu_without_transformer_engine_has_what_experts_need() -> None:
    (((problems,),),) = run_ranks(fork_worlds, 1, [(adapted_to_a_gpu, 1, ())], timeout_s=TIMEOUT_S)
    assert problems == []

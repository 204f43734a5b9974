"""What every trainer has to do for the loop, on four ranks in processes of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import slow
from tests.recipes_training import trainer_ranks
from tests.recipes_training.jobs import GPT_OSS, LLAMA, MEGATRON, make_job
from tests.recipes_training.workers import Workers

SIZE = 4
TARGET = f"{trainer_ranks.__name__}:main"
SHARDINGS: dict[str, dict[str, Any]] = {
    "copies": {},
    "hybrid": {"sharding": "hybrid", "num_replicas": 2},
    "full": {"sharding": "full"},
    "experts": {"sharding": "hybrid", "num_replicas": 2, "activation_checkpointing": True},
}
_MEGATRON = {**MEGATRON, "num_devices": SIZE, "num_replicas": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"overlap_grad_reduce": False, "overlap_param_gather": False},
    "tensor": {"tensor_parallel": 2, "precision": "bf16"},
    "pipeline": {"pipeline_parallel": 2},
}


CASES = [
    ("torch", "copies"),
    ("torch", "hybrid"),
    ("toy", "hybrid"),
    ("megatron", "tensor"),
    *(slow(("torch", each)) for each in ("full", "experts")),
    *(slow(("toy", each)) for each in ("copies", "full")),
    *(slow(("megatron", each)) for each in ("sharded", "pipeline")),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def found(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Return what each rank found."""
    kind, sharding = request.param
    folder = tmp_path_factory.mktemp("contract")
    if kind == "megatron":
        # Tensor ranks divide the vocabulary.
        model = {**LLAMA, "vocab_size": 260}
        job = make_job(trainer={**_MEGATRON, **LAYOUTS[sharding]}, model=model)
    else:
        # Two micro batches of each rank.
        sizes = {"num_devices": SIZE, "global_batch_size": 4 * SIZE, "micro_batch_size": 2}
        model = GPT_OSS if sharding == "experts" else LLAMA
        job = make_job(trainer={**sizes, **SHARDINGS[sharding]}, model=model)
    Workers().run(
        job, folder, num_workers=SIZE + 1, target=TARGET, variables={"TEST_TRAINER": kind}
    )
    ranks = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(SIZE)]
    ranks[0]["files"] = sorted(path.name for path in (folder / "model").iterdir())
    return ranks


def test_first_state_is_the_same_whatever_the_tensors_held(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["first"] == rank["again"] == rank["first after steps"]


def test_loss_norm_and_requests_are_equal_on_all_ranks(found: list[dict[str, Any]]) -> None:
    results = {json.dumps([step[:3] for step in rank["undisturbed"]]) for rank in found}

    assert len(results) == 1
    (steps,) = map(json.loads, results)
    assert [requests for _, _, requests in steps] == [0b1111] * 3
    assert len({loss for loss, _, _ in steps}) == 3


def test_each_step_changes_the_state(found: list[dict[str, Any]]) -> None:
    for rank in found:
        digests = [rank["first"], *(step[3] for step in rank["undisturbed"])]
        assert len(set(digests)) == 4


def test_settling_twice_leaves_the_same_bits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["settled twice"] == rank["undisturbed"][-1][3]


def test_step_that_is_computed_again_has_the_same_bits_and_the_same_parts(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        first, again = rank["parts"]
        assert first == again
    # The first numbers are the world's, the others each rank's own.
    assert len({json.dumps(rank["parts"][0][:2]) for rank in found}) == 1
    assert len({json.dumps(rank["parts"][0][2:]) for rank in found}) == SIZE


def test_steps_after_aborts_in_every_place_have_the_bits_of_undisturbed_ones(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        assert rank["after aborts"] == rank["undisturbed"]
        assert rank["old groups"] == 0


def test_update_from_kept_gradients_ends_in_the_next_generation(
    found: list[dict[str, Any]],
) -> None:
    for rank in found:
        undisturbed = rank["undisturbed"]
        assert rank["rolled forward"] == [undisturbed[0][:3], *undisturbed[1:]]


def test_faults_can_strike_at_every_place(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["told"] == [
            "backward",
            "forward",
            "in backward",
            "in reduction",
            "in settle",
            "in within_update",
        ]


def test_state_with_other_memory_has_the_same_bits(
    found: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    # A DTensor has more holders of its memory, the toy offers nothing.
    kind, sharding = request.node.callspec.params["found"]  # type: ignore[attr-defined]
    can_move = kind == "megatron" or (kind, sharding) == ("torch", "copies")

    for rank in found:
        assert rank["is moved"] == can_move
        assert rank["after the move"] == rank["undisturbed"]


def test_corruption_is_seen_in_the_view(found: list[dict[str, Any]]) -> None:
    assert all(rank["corrupt parameter"] for rank in found)


def test_ranks_of_a_shard_list_the_same_names(found: list[dict[str, Any]]) -> None:
    names = {(rank["shard"], json.dumps(rank["names"])) for rank in found}
    assert len(names) == len({rank["shard"] for rank in found})


def test_model_is_written_for_its_users(found: list[dict[str, Any]]) -> None:
    assert "model.safetensors" in found[0]["files"]

from __future__ import annotations

import pytest
import torch

from resilience.state.move import MoveResult, run_transfers
from tests.resilience.state.conftest import RunNode
from tests.resilience.state.nodes import PlainView
from tests.resilience.state.programs import PLACE_BYTES, odd_tensors

all_ways = pytest.mark.parametrize("way", ["shared", "buffer", "group"])
NUM_BYTES = sum(each.nbytes for each in odd_tensors(0))


@all_ways
@pytest.mark.parametrize(
    ("program", "sources"),
    [
        pytest.param("three_targets", [0, 0, 0, 0], id="three-targets"),
        pytest.param("crossing_lists", [0, 1, 1, 0, 1, 0, 6], id="crossing-lists"),
    ],
)
def test_targets_have_their_sources_bits(
    run_node: RunNode, program: str, sources: list[int], way: str
) -> None:
    outcome = run_node(program, num_ranks=len(sources), way=way)

    for rank, source in enumerate(sources):
        word = outcome.word(rank)
        assert word["has_state_of"] == source
        assert word["is_shared"] == (way == "shared")
        assert word["rest"] == {"position": source, "lr": 0.1 + source}
        assert word["source"] == (None if source == rank else source)
        num_targets = sources.count(rank) - (source == rank)
        assert word["num_bytes"] == (num_targets if source == rank else 1) * NUM_BYTES
        assert word["chunks"] == list(range(len(word["chunks"])))
        assert (word["chunks"] == []) == (source == rank)


@all_ways
def test_rest_travels_without_tensors(run_node: RunNode, way: str) -> None:
    outcome = run_node("no_tensors", way=way)

    assert outcome.word(1) == {"position": 0}


@all_ways
def test_sharded_state_goes_from_copy_to_copy(run_node: RunNode, way: str) -> None:
    outcome = run_node("sharded_state", num_ranks=4, way=way)

    words = [outcome.word(rank) for rank in range(4)]
    assert len({word["before"] for word in words}) == 4
    assert [word["after"] for word in words] == [words[n % 2]["before"] for n in range(4)]
    assert words[0]["names"][:3] == [
        "parameter/bias",
        "parameter/weight",
        "optimizer/bias/exp_avg",
    ]
    assert [words[n]["shapes"][:2] for n in (0, 1)] == [[[3], [3, 6]], [[2], [2, 6]]]


@all_ways
def test_changed_bit_is_an_error_on_both_sides(run_node: RunNode, way: str) -> None:
    outcome = run_node("flipped_bit", way=way)

    total = 5 if way == "group" else 19
    assert outcome.word(1).startswith(
        f"chunk 2 of {total} from rank 0 to rank 1 arrived with another checksum than it was sent"
    )
    assert outcome.word(0) == (
        "chunk 2 from rank 0 to rank 1 arrived with another checksum than it was sent with"
    )


def test_changed_rest_is_an_error_on_both_sides(run_node: RunNode) -> None:
    outcome = run_node("changed_rest")

    assert outcome.word(1) == (
        "the layout from rank 0 to rank 1 arrived with another checksum than it was sent with"
    )
    assert outcome.word(0) == (
        "state from rank 0 to rank 1 was refused; the target's error says why"
    )


def is_told_of_death(word: str) -> bool:
    """Gloo says that the connection is closed or reset, or its deadline ends the wait.

    A wait that begins while the connection breaks on a busy machine may only see its deadline.
    """
    return any(each in word for each in ("closed", "reset", "Timed out"))


@all_ways
def test_death_of_the_source_ends_the_target(run_node: RunNode, way: str) -> None:
    outcome = run_node("killed_source", way=way, statuses=[-9, 0])

    assert is_told_of_death(outcome.word(1))


@all_ways
def test_death_of_the_target_ends_the_source(run_node: RunNode, way: str) -> None:
    outcome = run_node("killed_target", way=way, statuses=[0, -9])

    assert is_told_of_death(outcome.word(0))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        pytest.param("unlike_layouts", "tensor 1 is t1 float32[3] there and t1 float32[4] here"),
        pytest.param("unlike_numbers", "1 tensors there and 2 here"),
    ],
)
def test_unlike_states_are_refused(run_node: RunNode, program: str, text: str) -> None:
    outcome = run_node(program)

    assert outcome.word(1) == f"state from rank 0 to rank 1 does not fit: {text}"
    assert outcome.word(0) == (
        "state from rank 0 to rank 1 was refused; the target's error says why"
    )


def test_ranks_that_disagree_about_the_way_do_not_wait(run_node: RunNode) -> None:
    outcome = run_node("unlike_paths")

    assert outcome.word(1) == (
        "state from rank 0 to rank 1 comes in chunks of 16384 bytes through the transfer buffer, "
        "expected 8388608 beside it; give both ranks the same transfer buffer"
    )


def run_alone(*transfers: tuple[int, int, bool], rank: int) -> MoveResult:
    group = torch.distributed.ProcessGroup(rank, 4)
    view = PlainView([])
    return run_transfers(
        transfers, view=view, rank=rank, group=group, transfer_buffer=None, local_ranks=[0, 1, 2, 3]
    )


def test_rank_outside_all_transfers_returns_at_once() -> None:
    assert run_alone((0, 1, True), rank=3) == MoveResult(num_bytes=0, source=None)


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        pytest.param([(0, 1, True), (1, 2, True)], r"\[1\] would send and receive", id="both"),
        pytest.param([(0, 2, True), (1, 2, True)], r"receive twice: targets \[2, 2\]", id="two"),
    ],
)
def test_plans_that_could_not_end_are_refused(
    transfers: list[tuple[int, int, bool]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_alone(*transfers, rank=3)


@all_ways
def test_shut_sockets_end_both_sides(run_node: RunNode, way: str) -> None:
    outcome = run_node("shut_sockets", way=way)

    for rank in range(2):
        assert "gloo" in outcome.word(rank)


def test_rank_without_a_place_takes_its_state_through_the_transfer_buffer(
    run_node: RunNode,
) -> None:
    outcome = run_node("one_side_in_shared_memory", way="shared")

    assert [outcome.word(rank) for rank in range(2)] == [[True, False], [False, False]]


def test_replaced_rank_takes_the_pages_of_the_dead_one(run_node: RunNode) -> None:
    outcome = run_node("replaced_rank", way="shared")

    word = outcome.word(1)
    assert word["left"] == 55
    assert word["sum"] == 0
    assert word["faults"] < PLACE_BYTES // 4096 // 10


def test_states_are_once_in_memory(run_node: RunNode) -> None:
    outcome = run_node("memory_of_both", way="shared")

    before, after = (sum(outcome.word(rank)[n] for rank in range(2)) for n in range(2))
    assert after - before < 0.02 * 2 * PLACE_BYTES

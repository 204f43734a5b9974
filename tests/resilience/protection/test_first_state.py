"""Which rank's first state a process is given that has run its set-up alone."""

from __future__ import annotations

import pytest

from resilience.errors import StateError, StateLostError
from resilience.protection.first_state import RankProgress as Rank
from resilience.protection.first_state import find_done, find_first_step, plan_first_state
from resilience.state.layout import Layout

TWO_COPIES = Layout(nodes=("a", "b"), num_local_ranks=2, num_shards=2, is_sharded=True)
ONE_SHARD = Layout(nodes=("a", "b"), num_local_ranks=2, num_shards=1, is_sharded=False)


@pytest.mark.parametrize(
    ("layout", "new", "transfers"),
    [
        pytest.param(ONE_SHARD, set(), [], id="none"),
        pytest.param(ONE_SHARD, {0}, [(1, 0, True)], id="first"),
        pytest.param(ONE_SHARD, {0, 1, 3}, [(2, 0, False), (2, 1, False), (2, 3, True)], id="all"),
        pytest.param(TWO_COPIES, {1, 2}, [(3, 1, False), (0, 2, False)], id="shards"),
    ],
)
def test_new_processes_are_given_the_state_of_the_first_rank_that_has_their_shard(
    layout: Layout, new: set[int], transfers: list[tuple[int, int, bool]]
) -> None:
    assert plan_first_state(layout, [rank in new for rank in range(4)]) == transfers


def begun(first: int, step: int = 0, done: int = 0) -> Rank:
    return Rank(is_new=False, step=step, done=done, first=first)


def late(first: int) -> Rank:
    return Rank(is_new=True, step=0, done=first, first=first)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        pytest.param([begun(0, 5, 5), begun(0, 5, 5)], (5, 5), id="all"),
        pytest.param([begun(0, 5, 5), begun(0, 5, 3)], (5, 5), id="one-ended"),
        pytest.param([begun(0, 5, 3), begun(0, 4, 4)], (5, 3), id="none-ended"),
        pytest.param([begun(0, 5, 5), late(0)], (5, 5), id="lost"),
        pytest.param([begun(4, 4, 0), late(9)], (4, 4), id="at-a-checkpoint"),
    ],
)
def test_functions_are_called_again_unless_a_rank_has_ended_them_which_all_have_then(
    told: list[Rank], found: tuple[int, int]
) -> None:
    assert find_done(told) == found


def test_late_process_that_found_a_newer_checkpoint_begins_with_the_others() -> None:
    assert find_first_step([begun(4), late(6), begun(4)]) == 4


def test_run_ends_where_ranks_have_loaded_different_checkpoints() -> None:
    with pytest.raises(StateError, match="begin with different steps: 4, 6; have all ranks load"):
        find_first_step([begun(4), begun(6)])
    with pytest.raises(StateLostError, match="no rank of the first set-up is left"):
        find_first_step([late(4)] * 2)


def test_run_ends_where_no_rank_of_the_first_set_up_has_a_shard() -> None:
    with pytest.raises(StateLostError, match="first set-up that holds shard 0 is left; start"):
        plan_first_state(TWO_COPIES, [True, False, True, False])

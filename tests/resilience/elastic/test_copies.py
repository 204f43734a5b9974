"""Which nodes make whole copies of the state, where one takes several."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.elastic.copies import add_holders, fill_copies


@pytest.mark.parametrize(
    ("columns", "newcomers", "num_copies", "found"),
    [
        pytest.param([["a", "c"], ["b", "d"]], [], 2, "abcd", id="all-keep-their-parts"),
        pytest.param([["a", "c"], ["d"]], [], 1, "ad", id="halves-of-two-copies-are-one"),
        pytest.param([["a", "c"], ["d"]], ["e"], 2, "adce", id="a-newcomer-takes-what-is-missing"),
        pytest.param([["a", "c", "e"], ["d"]], [], 2, "adce", id="else-one-of-too-many"),
        pytest.param([[], ["b", "d"]], [], 1, "db", id="of-a-part-that-nobody-has"),
        pytest.param([["a"], ["b"]], [], 2, "", id="too-few"),
    ],
)
def test_nodes_keep_their_part_of_a_copy(
    columns: list[list[str]], newcomers: list[str], num_copies: int, found: str
) -> None:
    assert fill_copies(columns, newcomers, num_copies) == tuple(found)


def test_those_that_go_stay_until_others_have_their_part() -> None:
    # The two that hold part 0 are to go; of those that hold part 1 one takes part 0.
    assert add_holders("db", [["a", "c"], ["b", "d"]], "abcd") == tuple("abdc")


def test_the_only_copy_needs_another_ones_nodes_to_hand_a_part_on() -> None:
    holders = [["a"], ["b"]]

    assert add_holders("ae", holders, "eab") == ()
    assert add_holders("ae", holders, "efab") == tuple("abfe")


@given(
    held=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_newcomers=st.integers(0, 6),
    num_copies=st.integers(1, 5),
)
def test_copies_are_whole_and_nobody_changes_its_part_needlessly(
    held: list[int], num_newcomers: int, num_copies: int
) -> None:
    columns = [[f"{part}-{number}" for number in range(num)] for part, num in enumerate(held)]
    newcomers = [f"new-{number}" for number in range(num_newcomers)]

    found = fill_copies(columns, newcomers, num_copies)

    num_parts = len(columns)
    are_enough = sum(held) + num_newcomers >= num_copies * num_parts
    assert len(found) == (num_copies * num_parts if are_enough else 0)
    assert len(set(found)) == len(found)
    for part, column in enumerate(columns if found else []):
        assert set(found[part::num_parts]) >= set(column[:num_copies])

"""Which samples a run takes that goes on otherwise than it did."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recipes_training.data.order import Split
from recipes_training.data.position import Position, next_position, note_position, read_position

DATA = {"samples": "9 samples", "source": "a"}


def go_on(known: Position, step: int, **changes: Any) -> Position:
    found = next_position(known, step=step, **{"batch": known.batch, **DATA, **changes})
    assert isinstance(found, Position)
    return found


def test_a_run_whose_batch_and_data_stay_counts_from_its_beginning() -> None:
    begun = go_on(Position(batch=8), 0)

    later = go_on(begun, 7)

    assert later == begun
    assert later.sample_of(7) == 56


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 64)), max_size=6))
def test_batches_that_change_leave_no_sample_out_and_repeat_none(
    changes: list[tuple[int, int]],
) -> None:
    position = go_on(Position(batch=8), 0)
    step, taken = 0, 0
    for num_steps, batch in changes:
        taken += num_steps * position.batch
        step += num_steps
        position = go_on(position, step, batch=batch)

        assert position.sample_of(step) == taken


def test_data_that_moved_are_the_same_data() -> None:
    begun = go_on(Position(batch=8), 0)

    moved = go_on(begun, 5, source="b")

    assert moved.sample_of(5) == 40


def test_other_data_begin_with_their_first_sample() -> None:
    begun = go_on(Position(batch=8), 0)

    other = go_on(begun, 5, samples="7 samples", source="b", batch=4)

    assert [other.sample_of(5), other.sample_of(6)] == [0, 4]


def test_data_that_changed_under_the_same_name_are_refused() -> None:
    begun = go_on(Position(batch=8), 0)

    assert next_position(begun, step=5, batch=8, samples="7 samples", source="a") == "9 samples"


def test_a_position_comes_back_from_what_goes_with_the_state() -> None:
    rest: dict[str, Any] = {}
    position = go_on(Position(step=3, sample=40, batch=8), 5, batch=2)
    note_position(rest, position)

    assert read_position(rest, batch=2) == position
    assert read_position({}, batch=8) == Position(batch=8)


def test_ranks_divide_the_samples_from_the_position_on() -> None:
    split = Split(
        global_batch_size=8, micro_batch_size=2, world_size=2, first_step=5, first_sample=41
    )

    taken = [
        position
        for step in (5, 6)
        for rank in range(2)
        for micro_batch in split.micro_batches(rank)
        for position in split.positions(step=step, micro_batch=micro_batch)
    ]

    assert taken == list(range(41, 57))

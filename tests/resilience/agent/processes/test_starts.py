"""What is tried again when a program does not start."""

from __future__ import annotations

import pytest

from resilience.agent.processes.starts import Starts, Tries
from resilience.agent.processes.worker import Worker

End = tuple[int, int | None, str]
"""The number of a process, how it ended, and its last words."""


@pytest.mark.parametrize(
    ("ends", "comes_again"),
    [
        pytest.param([(0, 1, "no"), (1, 1, "no")], True, id="same"),
        pytest.param([(0, 1, "no"), (1, 2, "no")], False, id="other-status"),
        pytest.param([(0, 1, "no"), (1, 1, "yes")], False, id="other-words"),
        pytest.param([(0, -9, ""), (1, -9, "")], False, id="killed"),
        pytest.param([(0, None, ""), (1, None, "")], False, id="never-forked"),
        pytest.param([(0, 1, "no"), (1, -9, ""), (2, 1, "no")], False, id="killed-between"),
        pytest.param([(0, 1, "no"), (1, 1, "yes"), (2, 1, "yes")], True, id="same-again"),
        pytest.param([(0, 1, "no"), (1, 1, "yes"), (2, 1, "no")], True, id="by-turns"),
    ],
)
def test_same_end_twice_in_a_row_would_come_again(ends: list[End], comes_again: bool) -> None:
    starts = Starts()

    found = [starts.fail(number, status, words, newest=number) for number, status, words in ends]

    assert found == [False] * (len(ends) - 1) + [comes_again]
    assert starts.num == len(ends)


def test_processes_of_one_start_prove_nothing_about_the_next() -> None:
    starts = Starts()

    assert not any(starts.fail(number, 1, f"rank {number}", newest=2) for number in range(3))
    assert starts.num == 1
    assert starts.fail(3, 1, "rank 1", newest=5)


def test_signal_in_a_start_makes_its_other_ends_prove_nothing() -> None:
    """They may be what comes of it."""
    starts = Starts()
    for number in (0, 10):
        assert not starts.fail(number, 1, "no peer", newest=number + 1)
        assert not starts.fail(number + 1, -9, "", newest=number + 1)

    assert not starts.fail(20, 1, "no peer", newest=20)


def test_good_start_begins_the_row_anew() -> None:
    starts = Starts()
    starts.fail(0, 1, "no", newest=0)

    starts.clear()

    assert not starts.fail(1, 1, "no", newest=1)
    assert starts.num == 1


@pytest.mark.parametrize(("age_s", "comes_again"), [(0.0, True), (59.9, True), (60.0, False)])
def test_program_that_ran_for_a_minute_had_begun(age_s: float, comes_again: bool) -> None:
    tries = Tries()
    found = [tries.give_up_program(Ended(generation), age_s) for generation in range(2)]

    assert found == [None, "ended in two starts" if comes_again else None]


class Ended(Worker):
    """A worker whose program has ended before it came to a block."""

    def __init__(self, generation: int) -> None:
        self.generation, self.status, self.last_words = generation, 1, "no such file"
        self.is_attached = self.is_condemned = False

    def describe_end(self, addition: str = "") -> str:
        return f"ended{addition}"

"""What the rules find that real runs are held against: each of them has something to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scenarios.membership.agents.counting import digests
from tests.scenarios.membership.agents.history import History, Noted

NUM_STEPS = 20
VALUES = digests("", num_ranks=2, num_steps=NUM_STEPS)
NODES = {0: ("a", "b"), 1: ("a", "c"), 2: ("b", "c")}
"""The members of each generation."""
LIVING = {"a": 1, "b": 2, "c": 3}
"""The process of each node."""


class Told:
    """A history that is told step by step, in time."""

    def __init__(self, *steps: int) -> None:
        """Begin with these steps."""
        self.history = History(num_ranks=2)
        self.now_s = 0.0
        self.begin(0, 0)
        self.go(0, *steps)

    def note(self, what: str, generation: int, rank: int, **fields: object) -> None:
        self.now_s += 1.0
        node = NODES[generation][rank]
        self.history.notes.append(
            Noted(
                what=what,
                generation=generation,
                rank=rank,
                node=node,
                pid=LIVING[node],
                at_s=self.now_s,
                fields=dict(fields),
            )
        )

    def begin(self, generation: int, step: int) -> None:
        nodes = list(NODES[generation])
        for rank in (0, 1):
            self.note("enter", generation, rank, nodes=nodes, starts=nodes)
        for rank in (0, 1):
            self.note("resume", generation, rank, step=step, role="kept")

    def go(self, generation: int, *steps: int) -> None:
        for step in steps:
            for rank in (0, 1):
                self.note(
                    "pass", generation, rank, step=step, begun_s=self.now_s, digest=VALUES[step]
                )

    def problems(self, *dead: str) -> list[str]:
        return self.history.problems({pid for node, pid in LIVING.items() if node not in dead})


def test_run_that_goes_on_is_as_it_should_be() -> None:
    told = Told(0, 1, 2)
    told.begin(1, 3)
    told.go(1, 3, 4)

    assert told.problems() == []


def test_state_that_nobody_holds_any_more_may_be_lost() -> None:
    told = Told(0, 1, 2)
    told.begin(1, 0)
    told.go(1, 0)

    (problem,) = told.problems("b")
    told.history.notes = [each for each in told.history.notes if each.node != "a"]
    assert "generation 1 begins at step 0, and processes that lived on held step 3" in problem
    assert told.problems("b") == []


def test_place_that_was_given_away_is_not_given_back() -> None:
    told = Told(0, 1, 2)
    told.note("enter", 1, 0, nodes=["a", "c"], starts=["a", "c"])
    told.begin(2, 0)

    assert told.problems("a") == []


def test_step_that_a_silent_node_has_passed_alone_is_run_again() -> None:
    told = Told(0, 1)
    told.note("pass", 0, 1, step=2, begun_s=told.now_s, digest=VALUES[2])
    told.begin(1, 2)
    told.go(1, 2)

    assert told.problems() == []


def test_step_that_a_member_has_passed_alone_is_not_run_again() -> None:
    told = Told(0, 1)
    told.note("pass", 0, 0, step=2, begun_s=told.now_s, digest=VALUES[2])
    told.begin(1, 2)

    (problem,) = told.problems()
    assert "generation 1 begins at step 2, and processes that lived on held step 3" in problem


def enter_twice(told: Told) -> None:
    told.note("enter", 1, 1, nodes=["a", "b"], starts=["a", "b"])


def be_two(told: Told) -> None:
    other = Noted(
        what="enter", generation=1, rank=1, node="c", pid=9, at_s=99.0,
        fields={"nodes": ["a", "c"], "starts": ["a", "c"]},
    )  # fmt: skip
    told.history.notes.append(other)


def go_on_in_the_old_generation(told: Told) -> None:
    told.go(0, 3)


def have_other_values(told: Told) -> None:
    told.note("pass", 1, 0, step=4, begun_s=told.now_s, digest="other")


def leave_a_step_out(told: Told) -> None:
    told.go(1, 5)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (enter_twice, "generation 1 has members"),
        (be_two, "rank 1 of generation 1 is two processes"),
        (go_on_in_the_old_generation, "a gate of generation 0 was passed after one of"),
        (have_other_values, "wrong values before step 4"),
        (leave_a_step_out, "comes after 4"),
    ],
)
def test_broken_promise_is_found(break_it: Callable[[Told], None], words: str) -> None:
    told = Told(0, 1, 2)
    told.begin(1, 3)
    told.go(1, 3)

    break_it(told)

    problems = told.problems()
    assert problems, words
    assert words in problems[0]

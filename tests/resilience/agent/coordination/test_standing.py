"""What an agent has been a member of, and what it has agreed to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.standing import Standing
from resilience.comm.messages import NO_BALLOT, Agree, Ballot, Failed, Learn, Open, Propose, Stopped
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, fresh_report


def layout(*nodes: str) -> Layout:
    return make_layout(nodes=nodes, num_local_ranks=1)


MEMBERS = layout("n0", "n1")
OPENED = Standing().open(Open(generation=4, rank=0, local_rank=0, layout=MEMBERS, head=""))


def propose(number: int, *nodes: str, generation: int = 5) -> Propose:
    return Propose(generation=generation, ballot=(number, "n0"), layout=layout(*nodes))


def told(standing: Standing) -> tuple[Ballot, Layout | None]:
    join = standing.join(node="n0", address="n0:1", start="a", sees_folder=False)
    return join.ballot, join.agreed


def test_newer_proposal_takes_the_place_of_an_agreement() -> None:
    standing, _ = OPENED.consider(propose(3, "n0", "n2"))

    standing, agreement = standing.consider(propose(4, "n0", "n3"))

    assert agreement == Agree(generation=5, ballot=(4, "n0"))
    assert told(standing) == ((4, "n0"), layout("n0", "n3"))


def test_in_one_ballot_an_agent_agrees_to_the_same_members_alone() -> None:
    first, other = propose(3, "n0", "n2"), propose(3, "n0", "n3")
    standing, _ = OPENED.consider(first)

    assert standing.consider(other) == (standing, None)
    assert standing.consider(first)[1] == Agree(generation=5, ballot=(3, "n0"))


@pytest.mark.parametrize("generation", [3, 4])
def test_proposal_for_a_generation_that_is_known_is_late(generation: int) -> None:
    late = propose(9, "n0", "n3", generation=generation)

    assert OPENED.consider(late) == (OPENED, None)


def test_agreement_to_another_generation_than_the_next_is_not_told() -> None:
    standing, _ = OPENED.consider(propose(3, "n0", "n2"))
    news = Learn(generation=6, opened=4, layout=MEMBERS, shares_folder=True)

    standing = standing.learn(news)

    assert told(standing) == (NO_BALLOT, None)
    assert (standing.generation, standing.opened, standing.shares_folder) == (6, 4, True)


def test_agreement_to_a_generation_beyond_the_next_is_not_told() -> None:
    """A coordinator would take it for one to the next."""
    standing, _ = OPENED.consider(propose(3, "n0", "n2", generation=7))

    assert told(standing) == (NO_BALLOT, None)


def test_older_news_changes_nothing() -> None:
    news = Learn(generation=4, opened=4, layout=layout("n7"), shares_folder=False)

    assert OPENED.learn(news) == OPENED


def stopped(generation: int, **more: Any) -> Stopped:
    report = replace(fresh_report(MEMBERS, 0, generation), **more)
    return Stopped(generation=generation, rank=0, report=report.to_json())


def test_what_was_held_counts_behind_a_generation_that_did_not_begin() -> None:
    news = Learn(generation=6, opened=4, layout=MEMBERS, shares_folder=False)
    held = stopped(4, phase=Phase.COMPUTING, step=9, member_generation=4)

    said = OPENED.learn(news).relabel(held)

    assert said == stopped(6, phase=Phase.COMPUTING, step=9, member_generation=6)


def test_what_was_held_counts_no_more_behind_a_generation_that_began_without_it() -> None:
    news = Learn(generation=6, opened=5, layout=MEMBERS, shares_folder=False)
    held = stopped(4, phase=Phase.COMPUTING, step=9, member_generation=4)

    standing = OPENED.learn(news)

    assert (standing.opened, standing.relabel(held)) == (5, held)


def test_what_missed_a_generation_still_counts_as_nothing() -> None:
    news = Learn(generation=6, opened=4, layout=MEMBERS, shares_folder=False)

    said = OPENED.learn(news).relabel(stopped(4, phase=Phase.COMPUTING, member_generation=2))

    assert said.report["member_generation"] == 2


@pytest.mark.parametrize("generation", [3, 6])
def test_what_is_said_of_another_generation_stays_so(generation: int) -> None:
    news = Learn(generation=6, opened=4, layout=MEMBERS, shares_folder=False)
    failed = Failed(generation=generation, rank=0, reason="died", text="")

    assert OPENED.learn(news).relabel(failed) == failed


@pytest.mark.parametrize(
    ("node", "is_common", "sees", "tells"),
    [
        pytest.param("n0", True, False, True, id="member-whose-folder-hangs"),
        pytest.param("n0", False, False, False, id="member-without-a-common-folder"),
        pytest.param("n2", True, False, False, id="standby-with-a-folder-of-its-own"),
        pytest.param("n2", True, True, True, id="standby-with-the-same-folder"),
        pytest.param("n2", False, True, True, id="standby-that-sees-the-coordinator's"),
    ],
)
def test_what_a_standby_has_heard_of_members_says_nothing_of_its_own_folder(
    node: str, *, is_common: bool, sees: bool, tells: bool
) -> None:
    """Half of a generation goes on with a record that all have to see."""
    members = replace(MEMBERS, starts=MEMBERS.nodes)
    news = Learn(generation=4, opened=4, layout=members, shares_folder=is_common)
    standing = Standing().learn(news)

    join = standing.join(node=node, address=f"{node}:1", start=node, sees_folder=sees)

    assert join.shares_folder == tells

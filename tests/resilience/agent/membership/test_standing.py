"""What an agent has been a member of, and what it has agreed to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.standing import Standing
from resilience.comm.messages import Agree, Failed, Learn, Open, Propose, Stopped
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, fresh_report


def layout(*nodes: str) -> Layout:
    return make_layout(nodes=nodes, num_local_ranks=1)


MEMBERS = layout("n0", "n1")
OPENED = Standing().open(
    Open(generation=4, rank=0, local_rank=0, layout=MEMBERS, store="", reports=())
)


def propose(ballot: int, *nodes: str, generation: int = 5) -> Propose:
    return Propose(generation=generation, ballot=ballot, layout=layout(*nodes))


def told(standing: Standing) -> tuple[int, Layout | None]:
    join = standing.join(node="n0", address="n0:1", start="a")
    return join.ballot, join.agreed


def test_agreement_is_told_to_every_coordinator_that_follows() -> None:
    standing, agreement = OPENED.consider(propose(3, "n0", "n2"), is_member=True)

    assert agreement == Agree(generation=5, ballot=3)
    assert told(standing) == (3, layout("n0", "n2"))


@pytest.mark.parametrize("ballot", [0, 3])
def test_older_proposal_is_not_agreed_to_any_more(ballot: int) -> None:
    standing, _ = OPENED.consider(propose(3, "n0", "n2"), is_member=True)

    assert standing.consider(propose(ballot, "n0", "n3"), is_member=True) == (standing, None)


@pytest.mark.parametrize("ballot", [0, 3])
def test_agent_without_a_vote_agrees_to_whoever_proposes_next(ballot: int) -> None:
    """The next coordinator does not know what number the last one has come to with it."""
    standing, _ = OPENED.consider(propose(3, "n2", "n3"), is_member=False)

    _, agreement = standing.consider(propose(ballot, "n2", "n3"), is_member=False)

    assert agreement == Agree(generation=5, ballot=ballot)


def test_newer_proposal_takes_the_place_of_an_agreement() -> None:
    standing, _ = OPENED.consider(propose(3, "n0", "n2"), is_member=True)

    standing, agreement = standing.consider(propose(4, "n0", "n3"), is_member=True)

    assert agreement == Agree(generation=5, ballot=4)
    assert told(standing) == (4, layout("n0", "n3"))


@pytest.mark.parametrize("generation", [3, 4])
def test_proposal_for_a_generation_that_is_known_is_late(generation: int) -> None:
    late = propose(9, "n0", "n3", generation=generation)

    for is_member in (True, False):
        assert OPENED.consider(late, is_member=is_member) == (OPENED, None)


def test_agreement_to_another_generation_than_the_next_is_not_told() -> None:
    standing, _ = OPENED.consider(propose(3, "n0", "n2"), is_member=True)
    news = Learn(generation=6, opened=4, layout=MEMBERS, shares_folder=True)

    standing = standing.learn(news)

    assert told(standing) == (-1, None)
    assert (standing.generation, standing.opened, standing.shares_folder) == (6, 4, True)


def test_agreement_to_a_generation_beyond_the_next_is_not_told() -> None:
    """A coordinator would take it for one to the next."""
    standing, _ = OPENED.consider(propose(3, "n0", "n2", generation=7), is_member=True)

    assert told(standing) == (-1, None)


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

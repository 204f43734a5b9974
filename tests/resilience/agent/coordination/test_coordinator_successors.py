"""What a coordinator decides that follows a lost one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.coordinator import decide, next_deadline_s, take_over
from resilience.agent.coordination.events import (
    Action,
    Claimed,
    ClaimRecord,
    NodeEnded,
    NodeJoined,
    Recorded,
    Tick,
)
from resilience.agent.coordination.founding import RENEWAL_S
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.votes import TIE, find_doubted, find_ended, find_verdict
from resilience.comm.messages import NO_BALLOT, Join
from resilience.state.layout import Layout
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    all_stopped,
    bound,
    broken,
    ends,
    failed,
    join,
    layout,
    learned,
    lost,
    opened,
    phases,
    places,
    play,
    promise,
    proposed,
    running,
    stopped,
)

MEMBERS = layout("n0", "n1", "n2")
THREE = replace(OPTIONS, num_nodes=3)


def succeed(options: Options = OPTIONS, **more: Any) -> State:
    return follow(options, layout("n0", "n1"), **more)


def follow(options: Options, members: Layout | None, generation: int = 4, **more: Any) -> State:
    known = generation if members else -1
    return take_over(
        options,
        Standing(generation=known, opened=known, layout=members, shares_folder=True),
        lost="n0",
        now_s=0.0,
        **more,
    )


def test_successor_asks_members_for_what_they_hold() -> None:
    state, actions = play(succeed(), join("n1", 4, ["n0", "n1"]))
    assert broken(actions) == ["n1"]

    state, actions = play(state, join("n2"), *places(1, generation=4))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (5, ("n2", "n1"))
    assert phases(opening) == ["fresh", "fresh", "computing", "computing"]


def test_successor_before_the_first_generation_gathers() -> None:
    state = follow(OPTIONS, None)

    state, actions = play(state, join("n1"), join("n2"))

    assert (state.stage, state.generation) == (Stage.RUNNING, 0)
    assert len(opened(actions)) == 2


def test_standby_that_succeeds_learns_of_a_newer_generation_from_its_members() -> None:
    """Its own count would begin the run again beside what the members hold."""
    state = follow(OPTIONS, layout("n0", "n3"), generation=3)
    state, actions = play(state, join("n2"), join("n1", 4, ["n0", "n1"]), now_s=1.0)
    assert (state.stage, state.generation, broken(actions)) == (Stage.STOPPING, 4, ["n1"])

    state, actions = play(state, *places(1, generation=4), now_s=1.0)
    assert opened(actions) == []
    state, actions = play(state, Tick(), now_s=4.0)

    assert [each.generation for each in opened(actions)] == [5, 5]
    assert state.nodes == ("n2", "n1")


def test_successor_learns_of_a_generation_that_was_just_opened() -> None:
    """The coordinator was lost when it had told one node of two: what the other one holds counts,
    since no step can have been committed without it."""
    state = follow(THREE, MEMBERS)
    state, actions = play(state, bound(join("n1", 4, MEMBERS.nodes), 1, MEMBERS))
    state, more = play(state, join("n2", 5, MEMBERS.nodes), join("n3"))
    assert (state.generation, state.opened, sorted(state.voters)) == (5, 4, ["n1", "n2"])
    assert learned(more) == ["n1", "n3"]

    reports = places(1, 2, generation=5)
    state, actions = play(state, *reports, Tick(), now_s=3.0)

    opening = opened(actions)[0]
    assert opening.generation == 6
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_new_member_that_was_still_to_be_told_counts_as_one_that_holds_nothing() -> None:
    members, before = layout("n0", "n3", "n2"), layout("n0", "n1", "n2")
    state = follow(THREE, members, generation=5)
    taker = bound(join("n3", 4, before.nodes), 1, members)
    state, actions = play(state, taker, join("n2", 5, members.nodes))
    assert (state.opened, sorted(state.voters), learned(actions)) == (4, ["n2", "n3"], ["n3"])

    own = [stopped("n3", rank, 5, step=None) for rank in (2, 3)]
    reports = [*own, *(stopped("n2", rank, 5) for rank in (4, 5))]
    state, actions = play(state, *reports, join("n4"), lost("n0"))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (6, ("n4", "n3", "n2"))
    assert phases(opening) == ["fresh"] * 4 + ["computing"] * 2


def test_what_a_member_has_agreed_to_comes_before_the_own_choice() -> None:
    """It may have come about with others, whom this coordinator does not see."""
    agreed = layout("n3", "n1", "n2")
    state = follow(THREE, MEMBERS)
    first = bound(join("n1", 4, MEMBERS.nodes), 7, agreed)
    state, _ = play(state, first, join("n2", 4, MEMBERS.nodes), join("n4"))

    state, actions = play(state, *places(1, 2, generation=4))

    (proposal, *_) = proposed(actions)
    assert (proposal.generation, proposal.ballot[0], proposal.layout) == (5, 8, agreed)
    assert opened(actions) == []
    assert (state.stage, state.generation, state.opened) == (Stage.STOPPING, 5, 4)
    assert learned(actions) == ["n1", "n2", "n4"]

    state, actions = play(state, *places(1, 2, generation=5))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (6, ("n4", "n1", "n2"))
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_newest_of_several_agreements_comes_first() -> None:
    state = follow(THREE, MEMBERS)
    joins = [
        bound(join(node, 4, MEMBERS.nodes), ballot, layout(taker, "n1", "n2"))
        for node, ballot, taker in (("n1", 9, "n3"), ("n2", 7, "n4"))
    ]

    _, actions = play(state, *joins, join("n5"), *places(1, 2, generation=4))

    proposal = proposed(actions)[0]
    assert (proposal.ballot[0], proposal.layout) == (10, layout("n3", "n1", "n2"))


def test_members_that_were_asked_for_are_asked_for_again_in_the_same_ballot() -> None:
    """Also once somebody knows more of the generation that has ended: agreements name a ballot."""
    told = places(0, 1, 2, generation=5)
    state = replace(follow(THREE, MEMBERS, generation=5), ballot=(1, "n3"))
    late = [
        bound(join("n1", 4, MEMBERS.nodes), 0, MEMBERS),
        join("n2", 5, MEMBERS.nodes),
        join("n4"),
        *told[2:],
        lost("n0"),
    ]
    knows_more = replace(join("n5", 5, MEMBERS.nodes).join, node="n5", start="n5")
    later = [lost("n1", is_dead=False), NodeJoined(join=knows_more), lost("n4")]
    back = [join("n0", 5, MEMBERS.nodes), join("n1", 5, MEMBERS.nodes), *told]
    actions: list[Action] = []
    for now_s, event in [*((4.0, each) for each in (*late, *later, *back)), (9.0, Tick())]:
        joined = isinstance(event, NodeJoined) and replace(event.join, promised=state.ballot)
        state, more = decide(state, NodeJoined(join=joined) if joined else event, now_s)
        actions += more
        for each in late_ones(state):
            promised = replace(state.present[each], promised=state.ballot)
            state, more = decide(state, NodeJoined(join=promised), now_s)
            actions += more

    asked = {(each.generation, each.ballot): each.layout for each in proposed(actions)}
    assert len(proposed(actions)) > 3
    assert all(asked[each.generation, each.ballot] == each.layout for each in proposed(actions))


def late_ones(state: State) -> list[str]:
    return [name for name, each in state.present.items() if each.promised != state.ballot]


def test_agreement_of_which_nobody_is_left_is_passed_over() -> None:
    agreed = layout("n8", "n1", "n9")
    state = follow(THREE, MEMBERS, generation=100, known={"n8", "n9"}, dead={"n8"})
    state, _ = play(replace(state, opened=0), join("n3"), join("n4"), join("n5"))
    last = bound(join("n1", 100, MEMBERS.nodes), 1, agreed).join
    state, _ = play(state, NodeJoined(join=replace(last, opened=0)), lost("n1"))
    assert state.accepted

    actions = []
    for node in ("n0", "n2", "n9"):
        ended = NodeEnded(node=node, starts=find_doubted(state)[node], reason="its node is off")
        state, more = play(state, ended)
        actions += more

    assert [each.layout.nodes for each in opened(actions)] == [("n3", "n4", "n5")] * 3


def test_half_whose_agreement_is_not_what_the_record_says_goes_on_with_neither() -> None:
    """Either may have come about, and whoever knows is on the other side."""
    first = bound(join("n1", 4, ["n0", "n1"]), 7, layout("n3", "n1"))
    state, actions = replace(succeed(), ballot=(8, "n2")), list[Action]()
    joined = [replace(each.join, promised=state.ballot) for each in (first, join("n2"))]
    reports = [*places(1, generation=4)]
    found = Claimed(generation=5, layout=layout("n0", "n4"))
    for event in [*(NodeJoined(join=each) for each in joined), *reports, Tick()]:
        state, more = decide(state, event, 3.0)
        actions += more
    for event in [*promise(state, "n1", "n2"), found, Tick()]:
        state, more = decide(state, event, 3.0)
        actions += more

    assert [each.generation for each in actions if isinstance(each, ClaimRecord)] == [5]
    assert (proposed(actions), state.stage, state.generation) == ([], Stage.STOPPING, 4)


def test_what_was_agreed_to_does_not_begin_with_another_start_of_an_agent() -> None:
    """It knows nothing of it, and would take no part."""
    agreed = layout("n3", "n1", "n2")
    agreed = replace(agreed, starts=("before", "n1", "n2"))
    state = follow(THREE, MEMBERS)
    first = bound(join("n1", 4, MEMBERS.nodes), 7, agreed)

    state, actions = play(
        state, first, join("n2", 4, MEMBERS.nodes), join("n3"), *places(1, 2, generation=4)
    )

    assert proposed(actions)[0].layout == agreed
    assert opened(actions) == []
    assert (state.stage, state.generation, state.opened) == (Stage.STOPPING, 5, 4)


def test_member_that_comes_a_moment_later_keeps_its_place() -> None:
    members = layout("n0", "n1", "n2", "n3", "n4")
    state = follow(replace(OPTIONS, num_nodes=5), members)
    here = [join(f"n{place}", 4, members.nodes) for place in (1, 2, 3)]
    reports = places(1, 2, 3, 4, generation=4)

    state, actions = play(state, *here, join("n5"), join("n6"), *reports[:6])
    assert opened(actions) == []
    _, actions = play(state, join("n4", 4, members.nodes), *reports[6:])

    opening = opened(actions)[0]
    assert opening.layout.nodes == ("n5", "n1", "n2", "n3", "n4")
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 8


@pytest.mark.parametrize(
    "late",
    [
        pytest.param(join("n1", 4, ["n2", "n1"]).join, id="of-other-members"),
        pytest.param(replace(join("n1", 4, ["n0", "n1"]).join, start="again"), id="started-again"),
    ],
)
def test_only_a_member_itself_has_its_vote(late: Join) -> None:
    state, actions = play(succeed(), NodeJoined(join=late))

    assert (state.voters, broken(actions)) == (frozenset(), [])


def test_node_of_an_older_generation_comes_back_without_state() -> None:
    state, actions = play(succeed(), join("n1", 3, ["n0", "n1"]), join("n2", 4, ["n2", "n1"]))

    assert "n1" not in broken(actions)
    assert "n1" not in state.voters


def test_node_that_had_a_members_place_in_an_older_generation_does_not_end_the_wait_for_it() -> (
    None
):
    """The member may hold the last copy of the state."""
    state = follow(OPTIONS, layout("n0", "n2"))

    state, actions = play(state, join("n1", 3, ["n0", "n1"]))
    assert opened(actions) == []
    state, actions = play(state, join("n2", 4, ["n0", "n2"]))
    assert (state.nodes, broken(actions)) == ((None, "n2"), ["n2"])

    state, actions = play(state, stopped("n2", 2, 4), stopped("n2", 3, 4))
    opening = opened(actions)[0]
    assert opening.layout.nodes == ("n1", "n2")
    assert phases(opening) == ["fresh", "fresh", "computing", "computing"]


def test_member_whose_node_has_come_anew_has_ended_also_once_that_joins_again() -> None:
    """Without it the run would wait for a member that is gone, where no other one is at hand."""
    state = follow(OPTIONS, layout("n0"))
    anew = replace(join("n0").join, start="again")

    for ballot in (NO_BALLOT, (3, "n1")):
        state, _ = decide(state, NodeJoined(join=replace(anew, promised=ballot)), 0.0)

        by_record = replace(state, read_after=find_ended(state))
        assert (state.dead, find_verdict(by_record)) == ({"n0"}, TIE)


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.RUNNING, Stage.STOPPING])
def test_every_stage_has_a_deadline(stage: Stage) -> None:
    state = replace(follow(OPTIONS, layout("n0")), stage=stage, since_s=7.0)

    assert 7.0 < next_deadline_s(state, 7.0) < 7.0 + 600


def test_late_member_of_a_newer_generation_is_followed_while_nothing_was_opened() -> None:
    state, _ = play(succeed(), Tick(), now_s=2.0)

    state, actions = play(state, join("n2", 6, ["n0", "n2"]), now_s=3.0)

    assert (state.stage, state.generation, broken(actions)) == (Stage.STOPPING, 6, ["n2"])


def test_all_members_of_a_newer_generation_are_waited_for() -> None:
    """One of them may hold the last copy of a shard."""
    state = follow(THREE, MEMBERS)
    state, _ = play(state, join("n2", 4, ["n0", "n1", "n2"]), join("n3"))
    state, actions = play(state, join("n1", 5, ["n0", "n1", "n4"]))
    state, more = play(state, *places(1, generation=5))
    assert opened([*actions, *more]) == []

    state, _ = play(state, join("n4", 5, ["n0", "n1", "n4"]))
    state, actions = play(state, stopped("n4", 4, 5), stopped("n4", 5, 5), Tick(), now_s=3.0)

    opening = opened(actions)[0]
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_late_member_of_a_newer_generation_waits_without_state_once_one_was_opened() -> None:
    state, _ = play(succeed(), join("n1", 4, ["n0", "n1"]), join("n3"))
    state, actions = play(state, *places(1, generation=4))
    assert opened(actions)[0].generation == 5

    state, _ = play(state, join("n2", 6, ["n0", "n2"]), failed("n3", 0, 5))
    state, actions = play(state, lost("n3"), *places(1, generation=5))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (6, ("n2", "n1"))
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 2


def test_coordinator_that_takes_over_counts_anew() -> None:
    options = replace(OPTIONS, restarts_without_progress_max=1)
    state, _ = play(running(options), failed("n0", 0), *all_stopped())
    state, _ = play(state, failed("n0", 0, 1), *all_stopped(1))
    _, actions = play(state, failed("n1", 2, 2), *all_stopped(2))
    assert "without" in ends(actions)[0].reason

    state = succeed(options, generation=2)
    members = [join(name, 2, ["n0", "n1"]) for name in ("n0", "n1")]
    _, actions = play(state, *members, *all_stopped(2))

    assert (ends(actions), opened(actions)[0].generation) == ([], 3)


def test_run_goes_on_where_the_coordinator_is_lost_while_the_state_is_saved() -> None:
    """The next one does not know that the run was to end."""
    options = replace(OPTIONS, restarts_without_progress_max=0)
    state, actions = running(options), list[Action]()
    for generation in range(2):
        told = places(0, 1, generation=generation, rest={"saved": 4, "place": "/run/state"})
        state, actions = play(state, failed("n0", 0, generation), *told)
    last = opened(actions)[-1]
    assert (last.generation, last.is_last) == (2, True)

    standing = Standing().open(last)
    state = take_over(options, standing, lost="n0", now_s=0.0)
    own = standing.join(node="n1", address="n1:1", start="n1", sees_folder=True)
    _, actions = play(
        state, NodeJoined(join=own), join("n2"), *(stopped("n1", rank, 2) for rank in (2, 3))
    )

    assert [(each.generation, each.is_last) for each in opened(actions)] == [(3, False)] * 2
    assert ends(actions) == []


@pytest.mark.parametrize("giving_up", [None, "it failed too often"])
def test_record_is_renewed_in_time_also_by_a_run_that_saves_before_it_ends(
    giving_up: str | None,
) -> None:
    options = replace(OPTIONS, last_save_deadline_s=300.0, stop_deadline_s=600.0)
    state = replace(running(options), giving_up=giving_up)

    assert next_deadline_s(state, state.since_s) <= state.since_s + RENEWAL_S


@pytest.mark.parametrize(
    ("generation", "status"),
    [
        pytest.param(4, 0, id="ended"),
        pytest.param(9, 75, id="gave-up-later"),
        pytest.param(3, None, id="an-older-generation-says-nothing"),
    ],
)
def test_node_that_was_silent_as_the_run_ended_ends_as_it_did(
    generation: int, status: int | None
) -> None:
    before, _ = play(succeed(), join("n1", 4, ["n0", "n1"]))

    record = Recorded(generation=generation, is_over=True, status=status or 0)
    state, actions = play(before, record)

    if status is None:
        assert (state, actions) == (before, [])
    else:
        assert [each.status for each in ends(actions)] == [status]
        assert state.stage == Stage.ENDED

"""What a coordinator decides that follows a lost one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.coordinator import decide, next_deadline_s, take_over
from resilience.agent.coordination.membership import (
    GATHERING,
    RUNNING,
    STOPPING,
    Action,
    Claimed,
    ClaimRecord,
    NodeJoined,
    Options,
    State,
    Tick,
)
from resilience.comm.messages import Join
from resilience.state.layout import Layout
from tests.resilience.agent.decisions import (
    OPTIONS,
    broken,
    failed,
    join,
    layout,
    learned,
    lost,
    opened,
    phases,
    play,
    proposed,
    stopped,
)


def succeed(options: Options = OPTIONS, **more: Any) -> State:
    return follow(options, layout("n0", "n1"), **more)


def follow(options: Options, members: Layout | None, generation: int = 4, **more: Any) -> State:
    known = generation if members else -1
    return take_over(
        options,
        generation=known,
        opened=known,
        layout=members,
        lost="n0",
        shares_folder=True,
        now_s=0.0,
        **more,
    )


def test_successor_asks_members_for_what_they_hold() -> None:
    state, actions = play(succeed(), join("n1", 4, ["n0", "n1"]))
    assert broken(actions) == ["n1"]

    state, actions = play(state, join("n2"), stopped("n1", 2, 4), stopped("n1", 3, 4))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (5, ("n2", "n1"))
    assert phases(opening) == ["fresh", "fresh", "computing", "computing"]


def test_successor_before_the_first_generation_gathers() -> None:
    state = follow(OPTIONS, None)

    state, actions = play(state, join("n1"), join("n2"))

    assert (state.stage, state.generation) == (RUNNING, 0)
    assert len(opened(actions)) == 2


def test_standby_that_succeeds_learns_of_a_newer_generation_from_its_members() -> None:
    """Its own count would begin the run again beside what the members hold."""
    state = follow(OPTIONS, layout("n0", "n3"), generation=3)
    state, actions = play(state, join("n2"), join("n1", 4, ["n0", "n1"]), now_s=1.0)
    assert (state.stage, state.generation, broken(actions)) == (STOPPING, 4, ["n1"])

    state, actions = play(state, stopped("n1", 2, 4), stopped("n1", 3, 4), now_s=1.0)
    assert opened(actions) == []
    state, actions = play(state, Tick(), now_s=4.0)

    assert [each.generation for each in opened(actions)] == [5, 5]
    assert state.nodes == ("n2", "n1")


def test_successor_learns_of_a_generation_that_was_just_opened() -> None:
    """The coordinator was lost when it had told one node of two: what the other one holds counts,
    since no step can have been committed without it."""
    members = layout("n0", "n1", "n2")
    state = follow(replace(OPTIONS, num_nodes=3), members)
    late = join("n1", 4, members.nodes).join
    late = replace(late, ballot=0, agreed=members)
    state, actions = play(state, NodeJoined(join=late))
    state, more = play(state, join("n2", 5, members.nodes), join("n3"))
    assert (state.generation, state.opened, sorted(state.voters)) == (5, 4, ["n1", "n2"])
    assert learned(more) == ["n1"]

    reports = [stopped(f"n{rank // 2}", rank, 5) for rank in range(2, 6)]
    state, actions = play(state, *reports, Tick(), now_s=3.0)

    opening = opened(actions)[0]
    assert opening.generation == 6
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_what_a_member_has_agreed_to_comes_before_the_own_choice() -> None:
    """It may have come about with others, whom this coordinator does not see."""
    members, agreed = layout("n0", "n1", "n2"), layout("n3", "n1", "n2")
    state = follow(replace(OPTIONS, num_nodes=3), members)
    first = replace(join("n1", 4, members.nodes).join, ballot=7, agreed=agreed)
    state, _ = play(state, NodeJoined(join=first), join("n2", 4, members.nodes), join("n4"))
    ends_of_4 = [stopped(f"n{rank // 2}", rank, 4) for rank in range(2, 6)]

    state, actions = play(state, *ends_of_4)

    (proposal, *_) = proposed(actions)
    assert (proposal.generation, proposal.ballot, proposal.layout) == (5, 8, agreed)
    assert opened(actions) == []
    assert (state.stage, state.generation, state.opened) == (STOPPING, 5, 4)
    assert learned(actions) == ["n1", "n2", "n4"]

    ends_of_5 = [stopped(f"n{rank // 2}", rank, 5) for rank in range(2, 6)]
    state, actions = play(state, *ends_of_5)

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (6, ("n4", "n1", "n2"))
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_newest_of_several_agreements_comes_first() -> None:
    members = layout("n0", "n1", "n2")
    state = follow(replace(OPTIONS, num_nodes=3), members)
    joins = [
        replace(join(node, 4, members.nodes).join, ballot=ballot, agreed=layout(taker, "n1", "n2"))
        for node, ballot, taker in (("n1", 9, "n3"), ("n2", 7, "n4"))
    ]
    ends_of_4 = [stopped(f"n{rank // 2}", rank, 4) for rank in range(2, 6)]

    _, actions = play(state, *(NodeJoined(join=each) for each in joins), join("n5"), *ends_of_4)

    proposal = proposed(actions)[0]
    assert (proposal.ballot, proposal.layout) == (10, layout("n3", "n1", "n2"))


def test_half_whose_agreement_is_not_what_the_record_says_goes_on_with_neither() -> None:
    """Either may have come about, and whoever knows is on the other side."""
    first = replace(join("n1", 4, ["n0", "n1"]).join, ballot=7, agreed=layout("n3", "n1"))
    events = [NodeJoined(join=first), join("n2"), stopped("n1", 2, 4), stopped("n1", 3, 4)]
    state, actions = succeed(), list[Action]()
    for event in [*events, Tick(), Claimed(generation=5, layout=layout("n0", "n4")), Tick()]:
        state, more = decide(state, event, 3.0)
        actions += more

    assert [each.generation for each in actions if isinstance(each, ClaimRecord)] == [5]
    assert (proposed(actions), state.stage, state.generation) == ([], STOPPING, 4)


def test_what_was_agreed_to_does_not_begin_with_another_start_of_an_agent() -> None:
    """It knows nothing of it, and would take no part."""
    members, agreed = layout("n0", "n1", "n2"), layout("n3", "n1", "n2")
    agreed = replace(agreed, starts=("before", "n1", "n2"))
    state = follow(replace(OPTIONS, num_nodes=3), members)
    first = replace(join("n1", 4, members.nodes).join, ballot=7, agreed=agreed)
    ends_of_4 = [stopped(f"n{rank // 2}", rank, 4) for rank in range(2, 6)]

    state, actions = play(
        state, NodeJoined(join=first), join("n2", 4, members.nodes), join("n3"), *ends_of_4
    )

    assert proposed(actions)[0].layout == agreed
    assert opened(actions) == []
    assert (state.stage, state.generation, state.opened) == (STOPPING, 5, 4)


def test_member_that_comes_a_moment_later_keeps_its_place() -> None:
    members = layout("n0", "n1", "n2", "n3", "n4")
    state = follow(replace(OPTIONS, num_nodes=5), members)
    here = [join(f"n{place}", 4, members.nodes) for place in (1, 2, 3)]
    reports = [stopped(f"n{rank // 2}", rank, 4) for rank in range(2, 10)]

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


@pytest.mark.parametrize("stage", [GATHERING, RUNNING, STOPPING])
def test_every_stage_has_a_deadline(stage: str) -> None:
    state = State(options=OPTIONS, stage=stage, since_s=7.0)

    assert 7.0 < next_deadline_s(state) < 7.0 + 600


def test_late_member_of_a_newer_generation_is_followed_while_nothing_was_opened() -> None:
    state, _ = play(succeed(), Tick(), now_s=2.0)

    state, actions = play(state, join("n2", 6, ["n0", "n2"]), now_s=3.0)

    assert (state.stage, state.generation, broken(actions)) == (STOPPING, 6, ["n2"])


def test_all_members_of_a_newer_generation_are_waited_for() -> None:
    """One of them may hold the last copy of a shard."""
    options = replace(OPTIONS, num_nodes=3)
    state = follow(options, layout("n0", "n1", "n2"))
    state, _ = play(state, join("n2", 4, ["n0", "n1", "n2"]), join("n3"))
    state, actions = play(state, join("n1", 5, ["n0", "n1", "n4"]))
    state, more = play(state, stopped("n1", 2, 5), stopped("n1", 3, 5))
    assert opened([*actions, *more]) == []

    state, _ = play(state, join("n4", 5, ["n0", "n1", "n4"]))
    state, actions = play(state, stopped("n4", 4, 5), stopped("n4", 5, 5), Tick(), now_s=3.0)

    opening = opened(actions)[0]
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 4


def test_late_member_of_a_newer_generation_waits_without_state_once_one_was_opened() -> None:
    state, _ = play(succeed(), join("n1", 4, ["n0", "n1"]), join("n3"))
    state, actions = play(state, stopped("n1", 2, 4), stopped("n1", 3, 4))
    assert opened(actions)[0].generation == 5

    state, _ = play(state, join("n2", 6, ["n0", "n2"]), failed("n3", 0, 5))
    state, actions = play(state, lost("n3"), stopped("n1", 2, 5), stopped("n1", 3, 5))

    opening = opened(actions)[0]
    assert (opening.generation, opening.layout.nodes) == (6, ("n2", "n1"))
    assert phases(opening) == ["fresh"] * 2 + ["computing"] * 2

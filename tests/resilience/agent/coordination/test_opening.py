"""How the next generation comes about, event by event: nobody agrees or answers by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.events import (
    Action,
    Claimed,
    ClaimRecord,
    FoundRun,
    Judged,
    NodeEnded,
    NodeJoined,
    Note,
    Recorded,
    Said,
    Send,
    Tick,
)
from resilience.agent.coordination.founding import SLACK, Record
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.opening import lacks_nodes
from resilience.agent.coordination.votes import find_doubted
from resilience.comm.messages import Agree, Ballot, Learn, Propose, Stopped
from resilience.elastic.policy import Policy
from resilience.state.report import Phase, Report
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    all_stopped,
    apart,
    bound,
    ends,
    failed,
    find_unread,
    hear,
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

THREE = replace(OPTIONS, num_nodes=3)
ONE = replace(OPTIONS, num_nodes=1)
SHARDS = replace(OPTIONS, num_shards=2, is_sharded=True)
"""Each node holds both shards."""
ONE_COPY = replace(OPTIONS, num_shards=4, is_sharded=True)


def read(state: State) -> Recorded:
    record = find_unread(state)
    assert record is not None
    return record


def agree(node: str, proposal: Propose, *, ballot: Ballot | None = None) -> Said:
    agreement = Agree(generation=proposal.generation, ballot=ballot or proposal.ballot)
    return Said(node=node, message=agreement)


def claims(actions: list[Action]) -> list[ClaimRecord]:
    return [each for each in actions if isinstance(each, ClaimRecord)]


# ---- how a run begins


def test_run_begins_with_the_record_of_its_folder() -> None:
    state, actions = hear(State(options=OPTIONS), join("n0"), join("n1"))
    assert actions[-1] == FoundRun(agents=("n0", "n1"))

    state, actions = hear(state, Judged(record=None, reason="n7 may go on"), Tick(), now_s=1.0)
    why = "the run does not begin yet: n7 may go on"
    assert actions == [Note(event="warning", fields={"text": why})]
    state, actions = hear(state, Tick(), now_s=2.0)
    assert actions == [FoundRun(agents=("n0", "n1"))]

    record = Record(run="run", number=1, agents=("n0", "n1"), generation=106)
    state, actions = play(state, Judged(record=record), now_s=2.0)
    assert [each.generation for each in opened(actions)] == [107, 107]


# ---- why a generation opens, waits or is refused


def test_decisions_say_why_a_run_does_not_begin() -> None:
    state, _ = hear(State(options=OPTIONS), join("n0"))
    assert state.reason == "waits for nodes to join"

    state, _ = hear(state, join("n1"), Tick(), now_s=1.0)
    assert state.reason == "waits for an answer of the run's folder"

    state, _ = hear(state, Judged(record=None, reason="n7 may go on"), now_s=1.0)
    assert state.reason == "n7 may go on"


def test_decisions_say_why_the_next_generation_does_not_open_yet() -> None:
    state, _ = hear(running(), failed("n1", 3), *all_stopped(but=[0]))
    assert state.reason == "waits until all ranks at hand have reported what they hold"

    state, actions = hear(state, *all_stopped(but=[1, 2, 3]))
    proposal, _ = proposed(actions)
    assert state.reason == "waits until the nodes that were asked agree to the members"

    state, _ = hear(state, agree("n0", proposal), agree("n1", proposal))
    assert (state.stage, state.reason) == (Stage.RUNNING, "")


def test_decisions_say_that_places_are_empty() -> None:
    nodes = ("n0", "n1", "n2")
    state, _ = play(State(options=THREE), *map(join, nodes))
    gone = [lost(node, is_dead=False) for node in nodes[1:]]
    state, _ = hear(state, *gone, *places(0))

    assert state.reason == "waits for nodes in the places of lost ones"
    assert lacks_nodes(state)
    assert not lacks_nodes(replace(state, awaited=frozenset({1}))), "it may come with its state"
    smaller = replace(state.options, policy=Policy(sizes=(1, 3), shrink_after_s=60.0))
    assert not lacks_nodes(replace(state, options=smaller))


# ---- what all have to agree to


def test_generation_opens_when_all_have_agreed_to_its_last_proposal() -> None:
    state, actions = hear(running(), failed("n1", 3), *all_stopped())
    proposal, _ = proposed(actions)
    assert (state.stage, proposal.layout) == (Stage.AGREEING, layout("n0", "n1"))

    others = [agree("n1", proposal, ballot=each) for each in ((9, "n2"), (-9, "n2"))]
    state, actions = hear(state, agree("n0", proposal), *others)
    assert opened(actions) == []
    state, actions = hear(state, agree("n1", proposal))

    assert len(opened(actions)) == 2


def test_rank_that_dies_while_nodes_agree_reports_anew() -> None:
    state, actions = hear(running(), failed("n1", 3), *all_stopped())
    proposal, _ = proposed(actions)

    state, actions = hear(
        state,
        failed("n1", 3, reason="died"),
        *(agree(node, proposal) for node in ("n0", "n1")),
    )
    assert opened(actions) == []
    state, actions = hear(state, stopped("n1", 3, step=None))

    assert phases(opened(actions)[0]) == ["computing"] * 3 + ["fresh"]


def test_members_that_may_have_come_about_are_proposed_again() -> None:
    """One of those that were asked is lost, and what the others have answered is on its way."""
    state, actions = hear(running(THREE, "n2", "n3", "n4"), lost("n0"), *places(1, 2))
    first = proposed(actions)[0]
    assert first.layout == layout("n3", "n1", "n2")

    state, actions = hear(state, lost("n3"))
    again = proposed(actions)[0]
    assert again == first

    state, actions = play(state, *(agree(node, again) for node in ("n1", "n2")))
    assert (opened(actions), learned(actions)) == ([], ["n1", "n2", "n4"])
    state, actions = play(state, *places(1, 2, generation=1))
    assert [each.layout for each in opened(actions)] == [layout("n4", "n1", "n2")] * 3


def test_new_member_has_a_vote_about_the_next_generation() -> None:
    state, _ = play(running(THREE, "n2", "n3"), lost("n0"), *places(1, 2))
    assert state.nodes == ("n3", "n1", "n2")

    reports = [stopped("n3", rank, 1) for rank in (0, 1)]
    state, actions = play(
        state, join("n4"), lost("n1", is_dead=False), *reports, *places(2, generation=1)
    )

    assert [each.layout.nodes for each in opened(actions)] == [("n3", "n4", "n2")] * 3


def test_who_joins_a_run_learns_how_far_it_is() -> None:
    _, actions = play(running(), join("n3"))

    known = ("n0", "n1", "n3")
    news = Learn(generation=0, opened=0, layout=layout("n0", "n1"), shares_folder=True, known=known)
    assert Send(node="n3", message=news) in actions


def test_coordinator_asks_in_a_later_ballot_than_any_that_was_promised() -> None:
    """Who has joined before is asked for its agreements anew: others may have asked it since."""
    events = [lost("n0"), *places(1, 2)]
    state = replace(running(THREE, "n2"), ballot=(0, "own"))
    state, actions = hear(state, *events, bound(join("n3"), 7, layout("n9")))
    assert (state.ballot, proposed(actions)) == ((8, "own"), [])

    state, actions = hear(state, *promise(state, "n1", "n3"), Tick())
    assert (state.stage, proposed(actions)) == (Stage.STOPPING, [])
    state, actions = hear(state, *promise(state, "n2"))

    assert [each.ballot for each in proposed(actions)] == [state.ballot] * 3
    assert proposed(actions)[0].layout == layout("n3", "n1", "n2")


def test_ballot_of_an_agent_that_is_not_asked_holds_nobody_up() -> None:
    other = bound(join("n4"), 7, layout("n9"))
    state, actions = hear(running(THREE, "n2", "n3"), other, lost("n0"), *places(1, 2))

    assert (state.stage, state.ballot[0]) == (Stage.AGREEING, 1)
    assert proposed(actions)[0].layout == layout("n3", "n1", "n2")


def test_first_members_that_somebody_has_agreed_to_are_asked_for_where_no_record_says() -> None:
    """They may have come about with the coordinator before."""
    first = layout("n2", "n1")
    heard = [apart("n0"), bound(apart("n1"), 7, first), apart("n3")]
    state, actions = play(State(options=replace(OPTIONS, num_standby_nodes=2)), *heard)
    assert opened(actions) == []
    state, actions = play(state, Tick(), now_s=OPTIONS.last_call_s)

    assert {each.layout for each in proposed(actions)} == {first}
    assert opened(actions) == []
    assert (state.generation, state.members) == (0, first)


# ---- which side goes on


def test_half_waits_for_the_record_of_the_next_number() -> None:
    state, before = hear(running(OPTIONS, "n2"), lost("n0", is_dead=False), *places(1))
    assert claims(before) == [], "n2 may be silent by now"
    state, actions = hear(state, *promise(state, "n1", "n2"))
    (claim,) = claims(actions)
    assert (claim.generation, claim.layout) == (1, layout("n2", "n1"))

    late = Claimed(generation=0, layout=claim.layout)
    state, more = hear(state, late, Claimed(generation=1, layout=None), Tick(), now_s=1.0)
    assert proposed([*actions, *more]) == []
    state, actions = hear(state, Tick(), now_s=2.0)
    assert claims(actions) == [claim]
    state, actions = hear(state, Claimed(generation=1, layout=claim.layout), now_s=2.0)

    proposal = proposed(actions)[0]
    assert proposal.layout == claim.layout


def test_half_goes_by_the_record_of_the_other_half() -> None:
    state, _ = hear(running(OPTIONS, "n2"), lost("n0", is_dead=False), *places(1))
    state, _ = hear(state, *promise(state, "n1", "n2"))

    state, actions = play(state, Claimed(generation=1, layout=layout("n0", "n3")))

    assert (opened(actions), learned(actions)) == ([], ["n1", "n2"])
    assert (state.generation, state.members) == (1, layout("n0", "n3"))
    known = ("n0", "n1", "n2")
    news = Learn(generation=1, opened=0, layout=layout("n0", "n3"), shares_folder=True, known=known)
    assert Send(node="n1", message=news) in actions


def test_half_without_a_common_folder_goes_on_with_the_first_node() -> None:
    for away, others, opens in (("n0", places(1), False), ("n1", places(0), True)):
        state = replace(running(OPTIONS, "n2"), shares_folder=False)

        _, actions = play(state, lost(away, is_dead=False), *others)

        assert bool(opened(actions)) == opens


@pytest.mark.parametrize("newest", [-1, 500])
def test_standby_alone_waits_for_whoever_may_have_gone_on(newest: int) -> None:
    """An agent that has ended may have opened generations that the record does not know yet."""
    state, before = play(running(ONE, "n2"), lost("n2", is_dead=False), lost("n0"))
    state, actions = play(state, Recorded(generation=newest))
    assert opened([*before, *actions]) == []

    _, actions = play(state, join("n2"))

    (opening,) = opened(actions)
    assert opening.generation > max(newest, 0) + SLACK


@pytest.mark.parametrize("is_lost", [False, True])
def test_numbers_are_passed_over_again_once_somebody_who_knows_them_is_lost(is_lost: bool) -> None:
    """Those that were told of the last number may have opened one behind it, and ended since."""
    state, _ = play(running(ONE, "n2"), lost("n0", is_dead=False))
    state = replace(state, generation=SLACK, leapt=SLACK)
    if is_lost:
        state, _ = play(state, lost("n2", is_dead=False), join("n2"))

    ended = NodeEnded(node="n0", starts=find_doubted(state)["n0"], reason="its node is off")
    _, actions = play(state, ended)

    (opening,) = opened(actions)
    assert opening.generation == (2 * SLACK + 1 if is_lost else SLACK + 1)


def test_run_begins_with_agents_that_have_joined_again_since_the_record_was_written() -> None:
    """Who has left in the meantime may have begun it with a record of its own, before this one."""
    record = Record(run="run", number=1, agents=("n0", "n1"), generation=99)
    one = replace(ONE, num_standby_nodes=1)
    for left in (True, False):
        state, actions = hear(State(options=one), join("n0"), join("n1"))
        assert FoundRun(agents=("n0", "n1")) in actions
        state, actions = hear(state, Judged(record=record))
        assert proposed(actions) == []
        state, actions = hear(state, *promise(state, "n0"))
        assert proposed(actions) == []

        more = [lost("n1", is_dead=False)] if left else promise(state, "n1")
        state, actions = hear(state, *more, Tick(), now_s=OPTIONS.last_call_s)

        assert [each.generation for each in proposed(actions)] == ([] if left else [100])
        assert (state.founding is None) == left


def test_run_that_has_its_record_at_the_join_deadline_begins() -> None:
    """A standby node that never comes was waited for until then."""
    record = Record(run="run", number=0, agents=("n0", "n1"), generation=-1)
    options = replace(OPTIONS, num_nodes=2, num_standby_nodes=1, join_deadline_s=20.0)
    state, actions = hear(State(options=options), join("n0"), join("n1"))
    assert actions[2:] == []

    state, actions = hear(state, Tick(), now_s=20.0)
    assert actions == [FoundRun(agents=("n0", "n1"))]
    state, actions = hear(state, Judged(record=record), Tick(), now_s=20.1)
    assert ends(actions) == []
    state, actions = hear(state, *promise(state, "n0", "n1"), now_s=20.2)

    assert [each.generation for each in proposed(actions)] == [0, 0]


def test_standby_alone_waits_for_whom_a_member_had_heard_of() -> None:
    told = replace(join("n2").join, known=("n0", "n9"))
    state, actions = play(running(ONE), NodeJoined(join=told), lost("n0"))
    assert (state.stage, opened(actions)) == (Stage.STOPPING, [])

    _, actions = play(state, join("n9"))

    assert opened(actions) != []


def test_half_that_others_have_ended_beside_gives_no_number_again() -> None:
    """Without a common folder the other half could have gone on before it ended."""
    state = replace(running(OPTIONS, "n2"), shares_folder=False)

    state, actions = play(state, lost("n0"), *places(1))
    _, more = play(state, *places(1, generation=state.generation), Tick())
    assert [each.generation > SLACK for each in opened([*actions, *more])] == [True, True]


def test_half_whose_record_is_of_others_goes_on_once_the_other_half_has_ended() -> None:
    state, _ = hear(running(OPTIONS, "n2"), lost("n0", is_dead=False), *places(1))
    state = replace(state, accepted={"n1": ((1, "n0"), layout("n0", "n1"))})
    state, actions = hear(state, Claimed(generation=1, layout=layout("n0", "n2")))
    assert (proposed(actions), state.generation) == ([], 0)

    state, _ = hear(state, join("n0"), lost("n0"))
    before = state.generation
    state, _ = hear(state, read(state))

    assert (before, state.generation, state.accepted, state.record) == (0, SLACK, {}, None)


# ---- whose place is given away


def said(rank: int, generation: int, *, is_replaced: bool = False, **report: Any) -> Said:
    node, shard = f"n{rank // 2}", str(rank)
    values = {"phase": Phase.COMPUTING, "step": 5, "member_generation": generation, **report}
    own = Report(rank=rank, node=node, generation=generation, shard=shard, **values)
    message = Stopped(
        generation=generation, rank=rank, report=own.to_json(), is_replaced=is_replaced
    )
    return Said(node=node, message=message)


def at(generation: int, options: Options) -> State:
    """Return a run with a standby node in its first or its second generation."""
    state = running(options, "n2")
    if generation:
        state, _ = play(state, failed("n0", 0), *places(0, 1))
    assert (state.stage, state.generation) == (Stage.RUNNING, generation)
    return state


@pytest.mark.parametrize(
    ("generation", "report", "is_given"),
    [
        pytest.param(0, {}, True, id="whole"),
        pytest.param(0, {"phase": Phase.TORN_UPDATE}, False, id="torn"),
        pytest.param(0, {"phase": Phase.TORN_REPAIR}, False, id="half-repaired"),
        pytest.param(0, {"is_healthy": False}, False, id="unhealthy"),
        pytest.param(0, {"phase": Phase.FRESH, "is_replaced": True}, False, id="replaced"),
        pytest.param(1, {"phase": Phase.FRESH}, False, id="not-yet-repaired"),
        pytest.param(0, {"phase": Phase.FRESH}, True, id="before-the-first-step"),
    ],
)
def test_place_is_kept_for_a_silent_node_that_may_hold_the_last_copy(
    generation: int, report: dict[str, Any], is_given: bool
) -> None:
    _, actions = play(
        at(generation, SHARDS),
        lost("n1", is_dead=False),
        said(0, generation, **report),
        said(1, generation),
    )

    assert bool(opened(actions)) == is_given


def test_last_holder_is_waited_for_with_patience() -> None:
    state, actions = play(at(0, ONE_COPY), lost("n1", is_dead=False), said(0, 0), said(1, 0))
    state, more = play(state, Tick(), now_s=599.0)
    assert (opened([*actions, *more]), ends(more)) == ([], [])

    _, actions = play(state, Tick(), now_s=600.0)

    assert phases(opened(actions)[0]) == ["computing"] * 2 + ["fresh"] * 2


def test_last_holder_that_has_said_goodbye_is_not_waited_for() -> None:
    _, actions = play(at(0, ONE_COPY), lost("n1"), said(0, 0), said(1, 0))

    assert phases(opened(actions)[0]) == ["computing"] * 2 + ["fresh"] * 2


def test_place_is_not_kept_where_a_report_is_missing_that_nobody_needs() -> None:
    limit_s = OPTIONS.join_deadline_s + OPTIONS.stop_deadline_s
    state, _ = play(at(0, OPTIONS), lost("n1", is_dead=False), stopped("n0", 0))

    state, actions = play(state, Tick(), now_s=limit_s - 1)
    assert (opened(actions), ends(actions)) == ([], [])
    _, actions = play(state, Tick(), now_s=limit_s)

    assert [each.status for each in ends(actions)] == [75, 75]


def test_reports_of_a_node_that_is_silent_since_are_no_copies() -> None:
    _, actions = play(
        at(0, ONE_COPY),
        failed("n1", 2),
        *(said(rank, 0) for rank in (2, 3, 0)),
        lost("n1", is_dead=False),
        said(1, 0),
    )

    assert opened(actions) == []

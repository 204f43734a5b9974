"""What the coordinator decides, one event at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilience.agent.coordination.coordinator import decide, next_deadline_s
from resilience.agent.coordination.counters import UNTOLD
from resilience.agent.coordination.events import (
    Action,
    Event,
    FoundRun,
    Judged,
    Note,
    Said,
    Send,
    Tick,
)
from resilience.agent.coordination.founding import SILENCE_S, Record
from resilience.agent.coordination.membership import Stage, State
from resilience.comm.messages import GAVE_UP_STATUS, End, Join, ReplaceRank
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    all_stopped,
    apart,
    broken,
    ends,
    failed,
    finished,
    join,
    lost,
    opened,
    phases,
    play,
    running,
    stopped,
)

# ---- gathering


def is_replacement(action: Action) -> bool:
    return isinstance(action, Send) and isinstance(action.message, ReplaceRank)


def test_first_generation_opens_with_the_last_node() -> None:
    state, actions = play(State(options=OPTIONS), join("n1"))
    assert (state.stage, opened(actions)) == (Stage.GATHERING, [])

    state, actions = play(state, join("n0"))

    first, second = opened(actions)
    assert (state.stage, state.generation, state.nodes) == (Stage.RUNNING, 0, ("n0", "n1"))
    # One message for all: it is encoded once.
    assert first is second
    assert first.layout.nodes == ("n0", "n1")
    assert phases(first) == ["fresh"] * 4


@pytest.mark.parametrize(("nodes_num", "members"), [(1, [("n1",)]), (2, [])])
def test_run_begins_with_agents_that_its_record_names(
    nodes_num: int, members: list[tuple[str, ...]]
) -> None:
    """One that comes while the disk is slow is in no record yet: others would not wait for it."""
    options = replace(OPTIONS, num_nodes=nodes_num, num_standby_nodes=1, last_call_s=5)
    record = Record(run="run", number=0, agents=("n1",), generation=-1)
    asking = State(options=options, is_claiming=True)

    state, actions = play(asking, join("n1"), join("n0"), Judged(record=record), now_s=5.0)

    assert [each.layout.nodes for each in opened(actions)] == members
    assert (state.stage == Stage.RUNNING) == bool(members)


def test_expected_standby_is_waited_for_until_the_last_call() -> None:
    options = replace(OPTIONS, num_standby_nodes=1, last_call_s=5)
    state, actions = play(State(options=options), join("n0"), join("n1"))
    assert opened(actions) == []

    _, too_early = play(state, Tick(), now_s=4.9)
    _, late = play(state, Tick(), now_s=5.0)
    _, complete = play(state, join("n2"), now_s=1.0)

    assert opened(too_early) == []
    assert len(opened(late)) == len(opened(complete)) == 2


def test_last_call_counts_from_the_last_agent_that_came_up_to_the_deadline() -> None:
    """Nodes of one job come one after the other, as their images are there."""
    options = replace(OPTIONS, num_standby_nodes=9, last_call_s=50, join_deadline_s=120)
    state, _ = play(State(options=options), join("n0"), join("n1"), now_s=10.0)

    state, early = play(state, Tick(), join("n2"), join("n0"), now_s=59.0)
    assert next_deadline_s(state, 59.0) == 109.0
    _, too_early = play(state, Tick(), now_s=108.0)
    _, late = play(state, Tick(), now_s=109.0)
    state, later = play(state, join("n3"), now_s=100.0)
    assert next_deadline_s(state, 100.0) == 120.0
    _, at_the_deadline = play(state, Tick(), now_s=120.0)

    assert opened(early) == opened(too_early) == opened(later) == []
    assert [len(opened(each)) for each in (late, at_the_deadline)] == [2, 2]


def test_too_few_nodes_end_the_run_at_the_deadline() -> None:
    state, _ = play(State(options=OPTIONS), join("n1"))

    state, actions = play(state, Tick(), now_s=120.0)

    assert state.stage == Stage.ENDED
    assert ends(actions) == [
        End(
            status=GAVE_UP_STATUS,
            reason="1 of 2 nodes joined within 120 s (n1); look at the logs of those that did "
            "not, or set a longer join deadline: a node joins when its workers have imported what "
            "they need",
        )
    ]


def test_half_without_a_common_folder_says_why_it_does_not_begin() -> None:
    options = replace(OPTIONS, num_standby_nodes=2)
    state, _ = play(State(options=options), apart("n0"), apart("n1"))

    state, actions = play(state, Tick(), Tick(), now_s=20.0)
    warnings = [each.fields["text"] for each in actions if isinstance(each, Note)]
    reason = (
        "2 of 4 nodes and standby nodes have come, and more than half have to where they see no "
        "common --run-dir: others could begin it as well"
    )
    assert warnings == [f"the run does not begin yet: {reason}"]
    ended, actions = play(state, Tick(), now_s=120.0)
    assert (ended.stage, ends(actions)[0]) == (
        Stage.ENDED,
        End(status=GAVE_UP_STATUS, reason=f"the run was not begun within 120 s: {reason}"),
    )

    _, actions = play(state, apart("n2"), Tick(), now_s=41.0)
    assert opened(actions) == []
    _, actions = play(state, apart("n2"), apart("n3"), now_s=41.0)
    assert [each.shares_folder for each in opened(actions)] == [False, False]


def test_newcomers_outwait_a_record_of_others() -> None:
    """It is void only after longer than nodes are given to come."""
    refused = Judged(record=None, reason="n2 may go on with the run")
    state, _ = decide(State(options=OPTIONS), join("n0"), 0.0)
    state, actions = decide(state, join("n1"), 0.0)
    assert FoundRun(agents=("n0", "n1")) in actions
    state, actions = decide(state, refused, 100.0)
    assert [each.fields for each in actions if isinstance(each, Note)] == [
        {"text": "the run does not begin yet: n2 may go on with the run"}
    ]

    state, actions = decide(state, Tick(), 100.0 + SILENCE_S)
    assert FoundRun(agents=("n0", "n1")) in actions
    _, actions = decide(state, refused, 100.0 + SILENCE_S)
    assert actions == []
    _, actions = decide(state, Tick(), 120.0 + SILENCE_S)
    assert ends(actions)[0] == End(
        status=GAVE_UP_STATUS,
        reason="the run was not begun within 300 s: n2 may go on with the run",
    )


def test_run_folder_that_never_answers_is_named() -> None:
    state, _ = decide(State(options=OPTIONS), join("n0"), 0.0)
    state, _ = decide(state, join("n1"), 0.0)

    state, early = decide(state, Tick(), 120.0)
    _, actions = decide(state, Tick(), 120.0 + SILENCE_S)

    assert early == []
    assert ends(actions)[0].reason == (
        "the run was not begun within 300 s: --run-dir does not answer"
    )


# ---- faults


@pytest.mark.parametrize("reason", ["exception", "died", "hung", "corrupt", "group"])
def test_first_fault_breaks_the_generation_for_all(reason: str) -> None:
    state, actions = play(running(), failed("n1", 3, reason=reason))

    assert state.stage == Stage.STOPPING
    assert broken(actions) == ["n0", "n1"]
    assert opened(actions) == []


def test_next_generation_opens_with_everybodys_report() -> None:
    state, _ = play(running(), failed("n1", 3, reason="died"), *all_stopped(but=[3]))
    assert state.stage == Stage.STOPPING

    state, actions = play(state, stopped("n1", 3, step=None))

    opening, _ = opened(actions)
    assert (state.stage, state.generation, opening.generation) == (Stage.RUNNING, 1, 1)
    assert phases(opening) == ["computing"] * 3 + ["fresh"]
    assert [report.rank for report in opening.read_reports()] == [0, 1, 2, 3]


def test_rank_that_has_stopped_by_itself_counts_as_a_fault() -> None:
    state, actions = play(running(), stopped("n0", 1))

    assert state.stage == Stage.STOPPING
    assert broken(actions) == ["n0", "n1"]
    assert set(state.reports) == {1}


def test_second_fault_meanwhile_waits_for_its_rank_anew() -> None:
    """Who dies after its report holds nothing: a generation may not count on it."""
    state, _ = play(running(), failed("n0", 0), *all_stopped(but=[2]))
    state, _ = play(state, failed("n1", 3, reason="died"))

    state, actions = play(state, stopped("n1", 2))
    assert opened(actions) == []
    state, actions = play(state, stopped("n1", 3, step=None))

    assert phases(opened(actions)[0]) == ["computing"] * 3 + ["fresh"]
    assert [each.node for each in state.incidents] == ["n1"]


def test_message_that_no_member_tells_a_coordinator_is_named() -> None:
    said = Said(node="n1", message=Join(node="n1", address=""))

    with pytest.raises(ValueError, match="n1 told the coordinator Join; allowed: Agree, Failed,"):
        decide(running(), said, 0.0)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(failed("n1", 3, generation=0), id="failed"),
        pytest.param(stopped("n1", 3, generation=0), id="stopped"),
        pytest.param(finished("n1", 3, generation=0), id="finished"),
        pytest.param(finished("n1", 3, generation=0, status=143), id="finished-by-signal"),
        pytest.param(failed("n9", 3, generation=1), id="stranger"),
        pytest.param(finished("n9", 3, generation=1, status=1, text="no"), id="stranger-finished"),
    ],
)
def test_late_messages_change_nothing(event: Event) -> None:
    state, _ = play(running(), failed("n0", 0), *all_stopped())
    assert (state.stage, state.generation) == (Stage.RUNNING, 1)

    assert play(state, event) == (state, [])


# ---- nodes


def test_standby_takes_the_place_of_a_lost_node() -> None:
    state, actions = play(running(OPTIONS, "n2"), lost("n0"))
    assert broken(actions) == ["n1"]
    assert state.nodes == (None, "n1")
    assert play(state, lost("n0")) == (state, []), "it is lost once"

    state, actions = play(state, stopped("n1", 2), stopped("n1", 3))

    assert state.nodes == ("n2", "n1")
    assert [each.layout.nodes for each in opened(actions)] == [("n2", "n1")] * 2
    assert phases(opened(actions)[0]) == ["fresh", "fresh", "computing", "computing"]


def test_lost_standby_breaks_nothing() -> None:
    state, actions = play(running(OPTIONS, "n2"), lost("n2"))

    assert state.stage == Stage.RUNNING
    assert [type(each) for each in actions] == [Note]


def test_node_lost_while_its_generation_stops_gives_its_place_away() -> None:
    state, _ = play(running(OPTIONS, "n2"), failed("n0", 0), *all_stopped(but=[0]))

    state, actions = play(state, lost("n1"), stopped("n0", 0))

    assert phases(opened(actions)[0]) == ["computing", "computing", "fresh", "fresh"]


def test_without_a_standby_the_run_says_what_to_do() -> None:
    state, _ = play(running(), lost("n1"), stopped("n0", 0), stopped("n0", 1))

    state, early = play(state, Tick(), now_s=2.9)
    state, told = play(state, Tick(), now_s=3.0)
    state, actions = play(state, Tick(), now_s=134.9)
    assert (early, ends(actions)) == ([], [])
    fields = {"reason": "n1 or another node", "seconds": 132.0}
    assert [*told, *actions] == [Note(event="node_awaited", fields=fields)]
    assert Note(event="node_awaited", fields=fields).words == (
        "waits 132 s at most for n1 or another node"
    )
    state, actions = play(state, Tick(), now_s=135.0)

    assert ends(actions) == [
        End(
            status=GAVE_UP_STATUS,
            reason="no node took the place of lost n1 within 135 s; "
            f"set resilience.checkpointless.standby_nodes (--standby-nodes){UNTOLD}",
        )
    ]


def test_rank_that_never_reports_ends_the_run() -> None:
    state, _ = play(running(), failed("n0", 0), *all_stopped(but=[1]))

    _, actions = play(state, Tick(), now_s=135.0)

    end, *_ = ends(actions)
    assert end.reason == f"ranks [1] neither stopped nor were replaced within 135 s{UNTOLD}"


@pytest.mark.parametrize(("is_dead", "opens"), [(True, True), (False, False)])
def test_standby_alone_goes_on_only_where_the_members_have_ended(
    is_dead: bool, opens: bool
) -> None:
    options = replace(OPTIONS, num_nodes=1)
    state, _ = play(State(options=options), join("n0"), join("n1"))

    state, actions = play(state, lost("n0", is_dead=is_dead))

    assert bool(opened(actions)) == opens
    if not opens:
        _, actions = play(state, Tick(), now_s=1199.0)
        assert ends(actions) == []
        _, actions = play(state, Tick(), now_s=1200.0)
        assert ends(actions)[0].reason == (
            "of the members of generation 0 none came and n0 did not within 1200 s; they may go on "
            f"elsewhere{UNTOLD}"
        )


# ---- counters


def test_process_that_fails_again_and_again_is_replaced() -> None:
    """What it still says of its state does not count; only a process that holds none does."""
    state, actions = play(running(), failed("n0", 0))
    assert not any(is_replacement(each) for each in actions)
    state, _ = play(state, *all_stopped(step=-1))
    state, actions = play(state, failed("n0", 0, 1), *all_stopped(1, step=-1))

    assert [each for each in actions if is_replacement(each)] == [
        Send(
            node="n0",
            message=ReplaceRank(rank=0, reason="faults again and again in one process"),
        )
    ]
    assert state.stage == Stage.STOPPING
    _, actions = play(state, stopped("n0", 0, 1, None))
    assert phases(opened(actions)[0])[0] == "fresh"


# ---- the end


def test_run_ends_when_all_ranks_have_finished() -> None:
    state, actions = play(running(), *(finished(f"n{r // 2}", r) for r in range(3)))
    assert ends(actions) == []

    state, actions = play(state, finished("n1", 3))

    assert state.stage == Stage.ENDED
    assert ends(actions) == [End(status=0, reason="all ranks have finished")] * 2


def test_stopped_ranks_end_the_run_after_the_stop_deadline() -> None:
    state, _ = play(running(), finished("n0", 0, status=143))

    _, early = play(state, Tick(), now_s=14.9)
    _, late = play(state, Tick(), now_s=15.0)

    assert ends(early) == []
    assert ends(late)[0].status == 143


@pytest.mark.parametrize("status", [1, 143])
@pytest.mark.parametrize("stage", ["running", "stopping", "older-generation"])
def test_last_word_of_a_member_ends_the_run_in_any_stage(stage: str, status: int) -> None:
    state, word = running(), "fatal" if status == 1 else "asked to end"
    if stage != "running":
        state, _ = play(state, failed("n0", 0))
    if stage == "older-generation":
        state, _ = play(state, *all_stopped())

    state, actions = play(state, finished("n1", 2, 0, status, word))
    if status == 143 and stage != "running":
        # What ranks hold is to be saved first: it asks again.
        assert ends(actions) == []
        generation = state.generation
        again = finished("n1", 2, generation, status, word)
        state, actions = play(state, again, now_s=15.0)

    told = UNTOLD if status == 143 and stage == "stopping" else ""
    assert state.stage == Stage.ENDED
    assert ends(actions) == [End(status=status, reason=f"rank 2: {word}{told}")] * 2


def test_nothing_happens_after_the_end() -> None:
    state, _ = play(running(), finished("n1", 2, 0, 1, "fatal"))

    assert play(state, join("n3"), lost("n0"), failed("n0", 0), Tick()) == (state, [])


@pytest.mark.parametrize("reason", ["exception", "died", "hung"])
def test_fault_that_is_heard_after_what_followed_from_it_is_the_first(reason: str) -> None:
    state, actions = play(
        running(), failed("n0", 0, reason="group"), failed("n1", 2, reason=reason)
    )
    other, _ = play(running(), failed("n1", 2, reason=reason), failed("n0", 0, reason="group"))

    assert [each.rank for each in actions if isinstance(each, Note) and each.rank is not None] == [
        0,
        2,
    ]
    assert state.first_failure == other.first_failure
    assert state.first_failure
    assert state.first_failure.rank == 2
    assert state.in_process == other.in_process == ({2: 1} if reason == "exception" else {})


def test_second_own_fault_in_one_generation_replaces_nobody() -> None:
    """Only that of the same rank in the next one does."""
    state, actions = play(running(), failed("n0", 0), failed("n1", 2))

    assert state.first_failure
    assert (state.first_failure.rank, state.in_process) == (0, {0: 1})
    assert [each for each in actions if is_replacement(each)] == []

"""What the run's record says of agents that are not at hand, event by event."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination.events import NodeEnded, Note, Recorded, Tick
from resilience.agent.coordination.founding import SLACK
from resilience.agent.coordination.votes import WAITS, find_doubted, find_ended, find_verdict
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    ends,
    hear,
    join,
    lost,
    opened,
    places,
    play,
    proposed,
    running,
    stopped,
)

ONE = replace(OPTIONS, num_nodes=1)


def test_agent_that_has_come_back_to_others_since_its_goodbye_is_waited_for() -> None:
    """Another start of it may hold what those have done since: here are only the first one's."""
    state, _ = play(running(ONE, "n2"), lost("n2", is_dead=False), lost("n0"))
    state, _ = play(state, Recorded(generation=5, starts={"n0": "n0#another"}))
    state, actions = play(state, join("n2"))
    assert opened(actions) == []

    assert "n0#another" in find_doubted(state)["n0"]
    ended = NodeEnded(node="n0", starts=find_doubted(state)["n0"], reason="its node is off")
    _, by_evidence = play(state, ended)
    _, with_it = play(state, join("n0"))

    assert len(opened(by_evidence)) == len(opened(with_it)) == 1


def test_agent_whose_goodbye_only_the_record_tells_of_is_not_waited_for() -> None:
    """Whoever coordinated when it left was told, and is lost."""
    state, _ = play(running(ONE, "n2"), lost("n2", is_dead=False), lost("n0", is_dead=False))
    state, actions = play(state, join("n2"))
    assert opened(actions) == []
    starts = dict(state.starts)

    _, of_another = play(state, Recorded(generation=5, starts={"n0": "x"}, gone=frozenset({"n0"})))
    _, actions = play(state, Recorded(generation=5, starts=starts, gone=frozenset({"n0"})))

    assert opened(of_another) == []
    assert len(opened(actions)) == 1


def test_agent_that_only_the_record_names_is_waited_for() -> None:
    state, _ = play(running(ONE, "n2"), lost("n2", is_dead=False), lost("n0"))
    state, _ = play(state, Recorded(generation=5, starts={"n9": "n9#1"}))

    state, actions = play(state, join("n2"))

    assert opened(actions) == []
    assert "n9" in find_doubted(state)


def test_fewer_than_half_go_on_alone_only_behind_a_reading_of_the_record() -> None:
    """Who stood still has old news: a node that has ended may have come again to the others."""
    state, _ = play(running(replace(OPTIONS, num_nodes=3), "n2"), lost("n1"))
    state, alone = hear(state, join("n8"), join("n9"), lost("n0"), *places(2))
    assert (proposed(alone), find_verdict(state)) == ([], WAITS)

    ended = find_ended(state)
    early = Recorded(generation=0, starts=state.starts)
    another = Recorded(generation=7, starts={**state.starts, "n0": "n0#another"}, after=ended)
    nobody = Recorded(generation=0, starts=state.starts, after=ended)
    waiting = [hear(state, record) for record in (early, another)]
    goes_on, actions = hear(state, nobody)

    assert [(proposed(each), find_verdict(after)) for after, each in waiting] == [([], WAITS)] * 2
    assert (goes_on.generation, actions != []) == (SLACK, True)


def test_folder_that_does_not_say_who_else_goes_on_is_named_at_the_end() -> None:
    options = replace(OPTIONS, num_nodes=3, partition_patience_s=10)
    state, _ = play(running(options, "n2"), lost("n1"))
    state, _ = hear(state, lost("n0"), *places(2))

    _, actions = hear(state, Tick(), now_s=1000.0)

    assert "the run's folder did not say within 20 s whether others go on" in str(ends(actions))


def test_nodes_that_are_waited_for_are_named_anew_as_they_become_others() -> None:
    state, _ = play(running(), lost("n1", is_dead=False), stopped("n0", 0), stopped("n0", 1))
    state, first = play(state, Tick(), now_s=3.0)
    state, _ = play(state, lost("n0", is_dead=False))
    state, second = play(state, Tick(), now_s=4.0)

    reasons = [each.fields["reason"] for each in (*first, *second) if isinstance(each, Note)]

    assert reasons == ["n1 or another node", "n0, n1, which may go on elsewhere"]

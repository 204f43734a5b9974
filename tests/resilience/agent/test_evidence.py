"""What the run's record says of agents that are not at hand, event by event."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination.membership import NodeEnded, Recorded
from resilience.agent.coordination.votes import find_doubted
from tests.resilience.agent.decisions import OPTIONS, join, lost, opened, play, running

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

"""Messages by their sender: each has its answer, or ends its connection."""

from __future__ import annotations

import pytest

from resilience.agent.coordination.events import Act, HangUp, NodeLost, warn
from resilience.agent.coordination.succession import ANSWERS
from resilience.agent.coordination.view import Role
from resilience.comm.messages import Beat, Learn, Message, Propose, Ready
from resilience.state.layout import make_layout
from tests.resilience.agent.coordination.test_succession import (
    LINK,
    ORDER,
    OTHER,
    ROSTER,
    events,
    following,
    heard,
    leading,
    play,
    promised,
)

OTHERS = ("an agent that has called", "an agent that has not joined")


def refusal(peer: int, sender: tuple[str, str], kind: str) -> list[Act]:
    name, role = sender
    text = f"the connection to {name} is closed: {role} never sends {kind}"
    return [warn(text), HangUp(peer=peer)]


@pytest.mark.parametrize(("peer", "is_heard"), [(LINK, True), (OTHER, False)])
def test_only_the_coordinator_is_heard(peer: int, is_heard: bool) -> None:
    """An agent that learns of none that others have heard of might count one as ended, and lead."""
    nodes = (("n7", "n7:1"), ("n2", "n2:1"))
    members = make_layout(nodes=("n0", "n2"), num_local_ranks=1)
    news = Learn(generation=4, opened=4, layout=members, shares_folder=True, known=("n0", "n8"))
    proposal = Propose(generation=5, ballot=(5, "n0"), layout=members)
    view = promised(following(), 5, "n0")

    _, acts = play(view, heard(peer, ORDER), heard(peer, proposal))
    told, _ = play(view, heard(peer, Beat(nodes=nodes, ballot=(5, "n0"))), heard(peer, news))

    assert acts == ([ORDER, proposal] if is_heard else refusal(OTHER, OTHERS, "Break"))
    assert told.roster == (nodes if is_heard else ROSTER)
    assert ("n8" in told.known) == is_heard


def test_message_that_its_sender_never_sends_is_named_and_ends_its_connection() -> None:
    ready = Ready(pid=1)
    view, acts = play(leading(), heard(LINK, ready))
    assert acts[:2] == refusal(LINK, ("n2", "a member"), "Ready")
    assert events(acts) == [NodeLost(node="n2", is_dead=False)]
    assert LINK not in view.lines

    view, acts = play(following(), heard(LINK, ready))
    assert acts[:2] == refusal(LINK, ("n0:1", "a coordinator"), "Ready")
    assert view.role == Role.SEEKING

    view, acts = play(following(), heard(OTHER, ready))
    assert acts == refusal(OTHER, OTHERS, "Ready")
    assert (view.role, list(view.lines)) == (Role.FOLLOWING, [LINK])


def test_every_message_of_an_agent_has_one_kind_of_sender_or_more() -> None:
    """Workers' messages and those of the store are answered before."""
    aside = {"Drain", "Drained", "Ready", "StoreReply", "StoreRequest"}
    known = {kind.__name__ for answers in ANSWERS.values() for kind in answers}

    assert known == {kind.__name__ for kind in Message.__subclasses__()} - aside

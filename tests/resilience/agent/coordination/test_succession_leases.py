"""Whom an agent follows once its coordinator is not heard any more."""

from __future__ import annotations

from collections.abc import Sequence

from resilience.agent.connections.transport import Gone, Heard, Reached
from resilience.agent.coordination.outlook import Act, Dial, Dialed, Heeded, Lead, Looked, Outlook
from resilience.agent.coordination.party import make_outlook
from resilience.agent.coordination.succession import decide
from resilience.comm.messages import Beat, Hello

LEASE_S = 3.0
FIRST, SECOND = "10.0.0.1:29500", "10.0.0.2:29500"
NAME = "first.example:29500"
"""What the endpoints call the first agent, which knows itself by its number."""


def play(view: Outlook, events: Sequence[Heeded], now_s: float = 0.0) -> tuple[Outlook, list[Act]]:
    acts: list[Act] = []
    for event in events:
        view, more = decide(view, event, now_s)
        acts += more
    return view, acts


def follower() -> Outlook:
    """Return the second agent, which has heard the first one, its coordinator, at 0 s."""
    view = make_outlook(
        run="run",
        node="n1",
        address=SECOND,
        start="second",
        endpoints=(NAME, SECOND),
        lease_s=LEASE_S,
        now_s=0.0,
    )
    hello = Hello(run="run", node="n0", address=FIRST, start="first", order=0, leader=FIRST)
    roster = Beat(nodes=(("n0", FIRST), ("n1", SECOND)))
    view, _ = play(
        view,
        [
            Looked(),
            Dialed(peer=1, address=NAME),
            Reached(peer=1),
            Heard(peer=1, message=hello),
            Heard(peer=1, message=roster),
        ],
    )
    return view


def test_silent_coordinator_has_one_lease() -> None:
    """It has not answered for that long, and is not asked for as long again."""
    view, now_s = follower(), 0.0
    acts: list[Act] = []
    while not any(isinstance(act, Lead) for act in acts):
        now_s += LEASE_S / 6
        view, acts = decide(view, Looked(), now_s)

    assert LEASE_S < now_s <= LEASE_S * 7 / 6
    assert Lead(lost="n0") in acts
    assert Dial(address=FIRST) in acts


def test_coordinator_whose_connection_has_ended_is_asked_once_more() -> None:
    view, acts = play(follower(), [Gone(peer=1, reason="it has ended the connection")])
    assert acts == [Dial(address=FIRST)]

    refused = [Dialed(peer=2, address=FIRST), Gone(peer=2, reason="nobody listens there")]
    _, acts = play(view, refused)
    assert Lead(lost="n0") in acts

"""Whom an agent follows, when it leads, and whom it hears: one event at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace

import pytest

from resilience.agent.connections.transport import Arrival, Gone, Heard, Reached
from resilience.agent.coordination.events import (
    Act,
    Dial,
    Dialed,
    Event,
    HandedOver,
    HangUp,
    Heeded,
    JoinAgain,
    Lead,
    Looked,
    NodeJoined,
    NodeLost,
    Resign,
    Tell,
)
from resilience.agent.coordination.succession import (
    OTHER_PROGRAM_STATUS,
    TAKEN_NAME_STATUS,
    decide,
)
from resilience.agent.coordination.view import Line, MembershipView, Role, find_endpoint_order
from resilience.comm.messages import (
    Beat,
    Break,
    End,
    Goodbye,
    Hello,
    Join,
    Message,
    Propose,
)
from resilience.state.layout import make_layout

LEASE_S = 3.0
ENDPOINTS = ("n0:1", "n1:1")
ROSTER = tuple((name, f"{name}:1") for name in ("n0", "n1", "n2"))
LINK, OTHER = 1, 2
ORDER = Break(generation=4, reason="")


def newcomer(node: str) -> MembershipView:
    address = f"{node}:1"
    order = find_endpoint_order(address, ENDPOINTS)
    own = Hello(run="run", node=node, address=address, start=node, order=order)
    return MembershipView(hello=own, endpoints=ENDPOINTS, lease_s=LEASE_S)


def following(node: str = "n2") -> MembershipView:
    """Return a member of generation 4, which n0 coordinates; another agent has called it."""
    view = newcomer(node)
    return replace(
        view,
        role=Role.FOLLOWING,
        link=LINK,
        lines={LINK: Line(heard_s=0.0, address="n0:1"), OTHER: Line(heard_s=0.0)},
        roster=ROSTER,
        hello=replace(view.hello, generation=4, order=2, leader="n0:1"),
    )


def leading(*, is_settled: bool = True) -> MembershipView:
    """Return what n1 knows that coordinates generation 4; n2 has joined it."""
    view = newcomer("n1")
    return replace(
        view,
        role=Role.LEADING,
        is_settled=is_settled,
        lines={LINK: Line(heard_s=0.0, join=join("n2")), OTHER: Line(heard_s=0.0, address="n0:1")},
        roster=ROSTER,
        hello=replace(view.hello, generation=4, order=1, leader="n1:1"),
    )


def join(node: str, start: str = "") -> Join:
    return Join(node=node, address=f"{node}:1", start=start or node)


def hello(
    node: str, *, generation: int, order: int = 0, leader: str = "", run: str = "run"
) -> Hello:
    return Hello(
        run=run,
        node=node,
        address=f"{node}:1",
        start=node,
        generation=generation,
        order=order,
        leader=leader,
    )


def play(
    view: MembershipView, *events: Heeded, now_s: float = 0.0
) -> tuple[MembershipView, list[Act]]:
    acts: list[Act] = []
    for event in events:
        view, more = decide(view, event, now_s)
        acts += more
    return view, acts


def gone(peer: int) -> Arrival:
    return Gone(peer=peer, reason="closed")


def heard(peer: int, message: Message) -> Arrival:
    return Heard(peer=peer, message=message)


def events(acts: list[Act]) -> list[object]:
    return [each for each in acts if isinstance(each, Event)]


def leads(acts: list[Act]) -> list[Act]:
    return [each for each in acts if isinstance(each, (Lead, Resign))]


# ---- silence, and what is none


def test_agent_that_was_not_heard_for_its_lease_is_silent_and_not_dead() -> None:
    view = replace(leading(), tick_s=LEASE_S)
    assert events(play(view, Looked(), now_s=LEASE_S)[1]) == []

    _, acts = play(view, Looked(), now_s=LEASE_S + 0.1)

    assert events(acts) == [NodeLost(node="n2", is_dead=False)]
    assert HangUp(peer=LINK) in acts


def test_agent_that_stood_still_itself_judges_nobody() -> None:
    """What the others have said meanwhile is still to be read."""
    view, acts = play(leading(), Looked(), now_s=3 * LEASE_S)
    assert events(acts) == []

    view = replace(view, tick_s=4 * LEASE_S)
    _, acts = play(view, Looked(), now_s=4 * LEASE_S + 0.1)

    assert events(acts) == [NodeLost(node="n2", is_dead=False)]


@pytest.mark.parametrize(
    ("arrival", "is_dead"),
    [
        pytest.param(gone(LINK), False, id="end-of-its-connection"),
        pytest.param(heard(LINK, Goodbye(reason="")), True, id="goodbye"),
    ],
)
def test_only_a_goodbye_is_evidence_of_an_end(arrival: Arrival, is_dead: bool) -> None:
    _, acts = play(leading(), arrival)
    view, _ = play(following(), arrival)

    assert events(acts) == [NodeLost(node="n2", is_dead=is_dead)]
    assert view.dead == ({"n0"} if is_dead else set())
    assert (view.role, view.lost) == (Role.SEEKING, "n0:1")


# ---- who leads


def test_agent_leads_when_all_have_been_asked_that_would_before_it() -> None:
    view, acts = play(following(), gone(LINK))
    assert acts == [Dial(address="n0:1"), Dial(address="n1:1")]

    view, acts = play(view, Dialed(peer=5, address="n0:1"), Dialed(peer=6, address="n1:1"), gone(5))
    assert leads(acts) == []
    view, acts = play(view, gone(6))

    assert leads(acts) == [Lead(lost="n0")]
    assert view.hello.leader == "n2:1"


@pytest.mark.parametrize(("node", "does"), [("n1", True), ("n9", False)])
def test_newcomer_leads_only_where_others_look_for_agents(node: str, does: bool) -> None:
    view, acts = play(newcomer(node), Looked())
    calls = [each.address for each in acts if isinstance(each, Dial)]

    for peer, address in enumerate(calls):
        view, more = play(view, Dialed(peer=peer, address=address), gone(peer))
        acts += more

    assert calls == [each for each in ENDPOINTS if each != f"{node}:1"]
    assert bool(leads(acts)) == does


@pytest.mark.parametrize(("generation", "follows"), [(3, False), (4, True), (5, True)])
def test_member_follows_nobody_of_an_older_generation(generation: int, follows: bool) -> None:
    view, _ = play(following(), gone(LINK), Dialed(peer=5, address="n0:1"))

    view, _ = play(view, heard(5, hello("n0", generation=generation, leader="n0:1")))

    assert (view.role == Role.FOLLOWING) == follows


def test_agent_of_another_run_is_hung_up_on() -> None:
    view, _ = play(following(), gone(LINK), Dialed(peer=5, address="n0:1"))

    other = hello("n0", generation=9, leader="n0:1", run="another")
    view, acts = play(view, heard(5, other))

    assert HangUp(peer=5) in acts
    assert view.role == Role.SEEKING


@pytest.mark.parametrize(
    ("is_settled", "generation", "order", "gives_way"),
    [
        pytest.param(False, 4, 0, True, id="to-an-earlier-one"),
        pytest.param(False, 4, 2, False, id="not-to-a-later-one"),
        pytest.param(False, 3, 0, False, id="not-to-an-older-generation"),
        pytest.param(True, 4, 0, False, id="not-with-a-generation-open"),
        pytest.param(True, 5, 2, True, id="but-to-a-newer-one"),
    ],
)
def test_coordinator_gives_way(
    is_settled: bool, generation: int, order: int, gives_way: bool
) -> None:
    other = hello("n0", generation=generation, order=order, leader="n0:1")

    view, acts = play(leading(is_settled=is_settled), heard(OTHER, other))

    assert leads(acts) == ([Resign()] if gives_way else [])
    assert view.role == (Role.FOLLOWING if gives_way else Role.LEADING)


def test_coordinator_that_hands_over_sends_all_to_the_next_one_and_follows_it_itself() -> None:
    view, acts = play(leading(is_settled=False), HandedOver(address="n2:1"))

    assert (view.role, leads(acts)) == (Role.SEEKING, [Resign()])
    told = [each.message for each in acts if isinstance(each, Tell) and each.peer == LINK]
    assert [each.leader for each in told if isinstance(each, Hello)] == ["n2:1"]
    assert {HangUp(peer=LINK), Dial(address="n2:1")} <= set(acts)

    # It is behind the next one in the order by then, and waits for it.
    called = play(view, Dialed(peer=7, address="n2:1"))[0]
    waiting, acts = play(called, heard(7, hello("n2", generation=4, order=2)))
    assert (waiting.role, leads(acts)) == (Role.SEEKING, [])
    view, _ = play(waiting, heard(7, hello("n2", generation=4, order=2, leader="n2:1")))
    assert (view.role, view.link) == (Role.FOLLOWING, 7)
    assert play(view, HandedOver(address="n1:1")) == (view, [])


# ---- who is heard


def test_second_agent_of_a_name_is_refused_once_the_first_is_heard() -> None:
    view, acts = play(leading(), heard(OTHER, join("n2", "another")))
    assert acts == []

    view, acts = play(view, heard(LINK, Beat()))

    (told,) = [each for each in acts if isinstance(each, Tell)]
    assert told.peer == OTHER
    assert isinstance(told.message, End)
    assert told.message.status == TAKEN_NAME_STATUS
    assert events(play(view, gone(LINK))[1]) == [NodeLost(node="n2", is_dead=False)]


def test_agent_that_comes_back_before_its_own_silence_is_noticed_waits_for_its_name() -> None:
    """Its host was switched off and on, so its old connection has not ended."""
    again = join("n2", "another")
    view, acts = play(leading(), heard(OTHER, again), now_s=1.0)
    view, more = play(replace(view, tick_s=LEASE_S), Looked(), now_s=LEASE_S)
    assert events([*acts, *more]) == []

    view, acts = play(view, Looked(), now_s=LEASE_S + 0.1)

    lost = NodeLost(node="n2", is_dead=False)
    assert events(acts) == [lost, NodeJoined(join=again)]
    assert view.waiting == {}


def test_agent_that_ends_while_it_waits_for_its_name_does_not_join() -> None:
    view, _ = play(leading(), heard(OTHER, join("n2", "another")), gone(OTHER))

    assert events(play(view, gone(LINK))[1]) == [NodeLost(node="n2", is_dead=False)]


def test_agent_whose_workers_run_something_else_is_refused_at_once() -> None:
    view = replace(leading(), program="job 1, code 2")
    same = replace(join("n3"), program="job 1, code 2")
    assert events(play(view, heard(OTHER, same))[1]) == [NodeJoined(join=same)]

    _, acts = play(view, heard(OTHER, replace(same, program="job 1, code 3")))

    assert acts == [
        Tell(
            peer=OTHER,
            message=End(
                status=OTHER_PROGRAM_STATUS,
                reason="node n3 has job 1, code 3; the run has job 1, code 2",
            ),
        )
    ]


def test_name_of_the_coordinator_is_refused_at_once() -> None:
    _, acts = play(leading(), heard(OTHER, join("n1", "another")))

    (told,) = acts
    assert isinstance(told, Tell)
    assert isinstance(told.message, End)


def test_agent_that_joins_over_another_connection_has_left_the_first() -> None:
    view, acts = play(leading(), heard(OTHER, join("n2")))

    assert events(acts) == [NodeLost(node="n2", is_dead=False), NodeJoined(join=join("n2"))]
    assert LINK not in view.lines


# ---- who is asked, and how often


class Callers:
    """One agent over time, in a network in which nothing answers; where it refuses, at once."""

    def __init__(self, view: MembershipView, *, refusing: Collection[str] = ()) -> None:
        self.view, self.refusing = view, refusing
        self.asked_s: dict[str, list[float]] = {}
        """When each address was asked."""
        self.open: dict[int, float] = {}
        """Calls without an answer, and when the transport gives them up."""
        self.num_open_max = 0
        self.leads_s: float | None = None
        self._peers = itertools.count(1000)

    def run(self, until_s: float, every_s: float = 0.1) -> Callers:
        """Look around as an agent does; stop where it leads a run that it has followed."""
        for tick in range(1, round(until_s / every_s) + 1):
            now_s = tick * every_s
            for peer in [each for each, due_s in self.open.items() if due_s <= now_s]:
                del self.open[peer]
                self._take(gone(peer), now_s)
            self._take(Looked(), now_s)
            self.num_open_max = max(self.num_open_max, len(self.open))
            if self.leads_s is not None:
                break
        return self

    def _take(self, event: Heeded, now_s: float) -> None:
        self.view, acts = play(self.view, event, now_s=now_s)
        for act in acts:
            if isinstance(act, HangUp):
                self.open.pop(act.peer, None)
            elif isinstance(act, Lead):
                self.leads_s = now_s
            elif isinstance(act, Dial):
                self.asked_s.setdefault(act.address, []).append(now_s)
                peer = next(self._peers)
                self.open[peer] = now_s if act.address in self.refusing else now_s + LEASE_S
                self._take(Dialed(peer=peer, address=act.address), now_s)


def test_silent_agents_keep_nobody_from_being_asked() -> None:
    """Fewer are asked at a time than there are, and a host that is off takes a lease to fail."""
    addresses = tuple(f"10.0.1.{number}:29500" for number in range(20))
    late = replace(newcomer("late"), endpoints=addresses)

    callers = Callers(late).run(3 * LEASE_S)

    assert callers.asked_s.keys() == set(addresses)
    assert callers.num_open_max == 8


@pytest.mark.parametrize(("num_silent", "leases"), [(1, 1), (2, 2), (8, 2), (9, 3), (16, 3)])
def test_each_eight_silent_agents_before_the_next_coordinator_take_a_lease(
    num_silent: int, leases: int
) -> None:
    """Another lease is for its members to come: with 2 silent it is three, with 16 of 32 four."""
    roster = tuple((f"n{number}", f"n{number}:1") for number in range(32))
    member = replace(following(f"n{num_silent}"), roster=roster)

    callers = Callers(member).run(5 * LEASE_S)

    assert callers.leads_s is not None
    assert leases * LEASE_S < callers.leads_s < (leases + 0.5) * LEASE_S


def test_silent_coordinator_that_was_called_by_another_name_has_one_lease() -> None:
    """It has not answered for that long, and is not asked for as long again."""
    view = replace(newcomer("n1"), endpoints=("n0.example:1", "n1:1"))
    called = Dialed(peer=1, address="n0.example:1")
    words = [hello("n0", generation=-1, leader="n0:1"), Beat(nodes=ROSTER[:2])]
    view, _ = play(view, Looked(), called, Reached(peer=1), *(heard(1, each) for each in words))

    callers = Callers(view).run(3 * LEASE_S)

    assert callers.leads_s is not None
    assert LEASE_S < callers.leads_s <= LEASE_S * 7 / 6
    assert "n0:1" in callers.asked_s


@pytest.mark.parametrize(
    ("refusing", "times"), [(["n0:1"], 10), ([], 4)], ids=["refusing", "silent"]
)
def test_side_that_may_not_go_on_asks_each_once_a_second_or_once_a_lease(
    refusing: list[str], times: int
) -> None:
    alone = replace(leading(is_settled=False), lines={})

    callers = Callers(alone, refusing=refusing).run(10)

    assert len(callers.asked_s["n0:1"]) == times


@pytest.mark.parametrize(
    "refusing", [["n0:1"], []], ids=["name-that-is-not-known-yet", "silent-address"]
)
def test_newcomer_asks_again_where_nobody_was(refusing: list[str]) -> None:
    """The transport gives up a name that it does not find at once, as an address that refuses."""
    callers = Callers(newcomer("n9"), refusing=refusing).run(2 * LEASE_S)

    assert len(callers.asked_s["n0:1"]) > 1


# ---- ballots


def promised(view: MembershipView, number: int, start: str) -> MembershipView:
    return replace(view, hello=replace(view.hello, ballot=(number, start)))


def test_coordinator_asks_in_a_ballot_of_its_own_after_all_that_it_has_heard_of() -> None:
    asked = Dialed(peer=LINK, address="n1:1")

    view, acts = play(promised(newcomer("n0"), 5, "n7"), asked, gone(LINK))

    assert [type(act) for act in leads(acts)] == [Lead]
    assert view.hello.ballot == (6, "n0")


@pytest.mark.parametrize(
    ("own", "newest"), [((9, "n7"), (9, "n7")), ((3, "n7"), (5, "n0")), ((5, "n7"), (5, "n7"))]
)
def test_follower_keeps_to_the_latest_ballot_that_it_has_heard_of(
    own: tuple[int, str], newest: tuple[int, str]
) -> None:
    leader = replace(hello("n0", generation=4, leader="n0:1"), ballot=(5, "n0"))
    calls = Dialed(peer=LINK, address="n0:1")

    view, _ = play(promised(newcomer("n1"), *own), calls, heard(LINK, leader))

    assert (view.role, view.hello.ballot) == (Role.FOLLOWING, newest)


@pytest.mark.parametrize("ballot", [(4, "n0"), (5, "n0"), (5, "n7"), (6, "n0")])
def test_agent_agrees_only_to_what_is_asked_in_the_ballot_in_which_it_has_joined(
    ballot: tuple[int, str],
) -> None:
    members = make_layout(nodes=("n0", "n2"), num_local_ranks=1)
    proposal = Propose(generation=5, ballot=ballot, layout=members)

    _, acts = play(promised(following(), 5, "n0"), heard(LINK, proposal))

    assert acts == ([proposal] if ballot == (5, "n0") else [])


def test_agent_joins_again_when_its_coordinator_asks_in_a_later_ballot() -> None:
    beat = Beat(nodes=ROSTER, ballot=(6, "n0"))

    view, acts = play(promised(following(), 5, "n0"), heard(LINK, beat))
    assert (acts, view.hello.ballot) == ([JoinAgain()], (6, "n0"))

    for number in (5, 6):
        view, acts = play(view, heard(LINK, replace(beat, ballot=(number, "n0"))))
        assert (acts, view.hello.ballot) == ([], (6, "n0"))

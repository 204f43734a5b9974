"""Whom an agent follows: the coordinator, who comes after it, or nobody but itself. Pure.

An agent that has no coordinator asks those that would lead before it, and the one that it had.
It follows whoever leads, and leads itself once none of them answers. A coordinator without an open
generation goes on asking: it gives way to one of a newer generation, and to one that is earlier in
the order. That two lead for a while does no harm: what a coordinator may open is decided by the
members that are with it, in `opening`. Each asks in a ballot of its own, and an agent that has
followed one of a later ballot agrees to nothing that is asked in an earlier one.

Silence is not death: an agent that answers nothing, or whose connection has ended without a
goodbye, may live on, and comes back to whoever leads by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from resilience.agent.connections.transport import Came, Gone, Reached
from resilience.agent.coordination import events
from resilience.agent.coordination.view import NO_ORDER, Line, MembershipView, Result, Role
from resilience.agent.coordination.votes import next_ballot
from resilience.comm import messages
from resilience.comm.messages import End, Goodbye, Hello, Join, Message, Propose

TAKEN_NAME_STATUS = 2
"""Exit status of an agent whose name another one has."""
OTHER_PROGRAM_STATUS = 2
"""That of one whose workers run something else."""
_RETRY_S = 0.1
"""Before an agent that did not answer is asked again."""
_RETRY_LEADING_S = 1.0
"""The same for a coordinator, which has others to care for."""
_CALLS_MAX = 8
"""Agents that are asked at a time."""


def decide(view: MembershipView, event: events.Heeded, now_s: float) -> Result:
    """Return what the agent knows now, and its acts."""
    return _admit(_heed(view, event, now_s))


def _heed(view: MembershipView, event: events.Heeded, now_s: float) -> Result:
    match event:
        case Came():
            return _with_line(view, event.peer, Line(heard_s=now_s)), []
        case events.Dialed():
            view = replace(view, called_s={**view.called_s, event.address: now_s})
            return _with_line(view, event.peer, Line(heard_s=now_s, address=event.address)), []
        case events.Moved():
            hello = replace(view.hello, generation=event.generation, order=event.order)
            return replace(view, hello=hello), []
        case events.Settled():
            return replace(view, is_settled=event.is_open), []
        case events.HandedOver():
            return _hand_over(view, event.address, now_s)
        case events.Looked():
            return _look(view, now_s)
        case _ if event.peer not in view.lines:
            return view, []
        case Reached():
            return _touch(view, event.peer, now_s), [
                events.Tell(peer=event.peer, message=view.hello)
            ]
        case Gone():
            return _and_seek(_lose(view, event.peer, now_s), now_s)
    view, acts = _refuse_others(_touch(view, event.peer, now_s), event.peer)
    sender = _find_sender(view, event.peer)
    answer = ANSWERS[sender].get(type(event.message))
    if answer is None:
        view, more = _refuse_message(view, event.peer, sender, event.message, now_s)
    else:
        view, more = answer(view, event.peer, event.message, now_s)
    return view, [*acts, *more]


def _find_sender(view: MembershipView, peer: int) -> Sender:
    if peer == view.link:
        return Sender.COORDINATOR
    has_joined = view.lines[peer].join is not None and view.role == Role.LEADING
    return Sender.MEMBER if has_joined else Sender.OTHER


def _refuse_message(
    view: MembershipView, peer: int, sender: Sender, message: Message, now_s: float
) -> Result:
    """End a connection over which a message came that its sender never sends."""
    line = view.lines[peer]
    name = line.join.node if line.join else line.address or "an agent that has called"
    kind = type(message).__name__
    warning = events.warn(f"the connection to {name} is closed: {sender.value} never sends {kind}")
    view, acts = _lose(view, peer, now_s)
    return _and_seek((view, [warning, events.HangUp(peer=peer), *acts]), now_s)


# ---- lines


def _with_line(view: MembershipView, peer: int, line: Line) -> MembershipView:
    return replace(view, lines={**view.lines, peer: line})


def _touch(view: MembershipView, peer: int, now_s: float) -> MembershipView:
    return _with_line(view, peer, replace(view.lines[peer], heard_s=now_s))


def _drop(view: MembershipView, peer: int) -> MembershipView:
    waiting = {key: join for key, join in view.waiting.items() if key != peer}
    lines = {key: line for key, line in view.lines.items() if key != peer}
    return replace(view, lines=lines, waiting=waiting)


def _clear(view: MembershipView, *addresses: str | None) -> MembershipView:
    hints = tuple(each for each in view.hints if each not in addresses)
    cleared = view.cleared | {each for each in addresses if each is not None}
    return replace(view, hints=hints, cleared=cleared)


def _lose(
    view: MembershipView, peer: int, now_s: float, *, is_dead: bool = False, is_silent: bool = False
) -> Result:
    """Take note that a connection has ended, or is to end for its silence."""
    line = view.lines[peer]
    view = _drop(view, peer)
    if peer == view.link:
        # Found under whatever name, the roster has it under the address that it gives.
        leader = view.hello.leader
        view = _seek_anew(view, now_s, lost=leader, is_dead=is_dead)
        # To wait once more for an answer would take as long again.
        return replace(view, cleared=frozenset({leader})) if is_silent else view, []
    view = _clear(view, line.address)
    if line.join is not None and view.role == Role.LEADING:
        lost = events.NodeLost(node=line.join.node, is_dead=is_dead)
        return view, [lost]
    return view, []


def _look(view: MembershipView, now_s: float) -> Result:
    """End the leases of those that were silent, and renew the agent's own."""
    if now_s - view.tick_s > view.lease_s / 2:
        # It was this agent that stood still: what the others have said is still unread.
        lines = {peer: replace(line, heard_s=now_s) for peer, line in view.lines.items()}
        view = replace(view, lines=lines)
    view = replace(view, tick_s=now_s)
    acts: list[events.Act] = []
    for peer, line in view.lines.items():
        if now_s - line.heard_s > view.lease_s:
            view, more = _lose(view, peer, now_s, is_silent=True)
            acts += [events.HangUp(peer=peer), *more]
    link = view.link
    if link is not None and now_s - view.beat_s >= view.beat_every_s:
        view = replace(view, beat_s=now_s)
        acts.append(events.Tell(peer=link, message=messages.Beat()))
    return _and_seek((view, acts), now_s)


# ---- who leads


def _seek_anew(
    view: MembershipView, now_s: float, *, lost: str = "", hint: str = "", is_dead: bool = False
) -> MembershipView:
    """Follow nobody, and lead no longer."""
    names = {address: node for node, address in view.roster}
    return replace(
        view,
        role=Role.SEEKING,
        link=None,
        lost=lost,
        dead=view.dead | ({names[lost]} if is_dead and lost in names else set()),
        hints=(hint,) if hint else (),
        cleared=frozenset(),
        called_s={},
        waiting={},
        is_settled=False,
        hello=replace(view.hello, leader=""),
    )


def _and_seek(result: Result, now_s: float) -> Result:
    """Ask those that are to be asked, and lead where none of them does."""
    view, acts = result
    if view.role == Role.FOLLOWING or (view.role == Role.LEADING and view.is_settled):
        return view, acts
    is_found = bool(view.roster) or view.hello.address in view.endpoints
    if view.role == Role.SEEKING and is_found and view.cleared.issuperset(_earlier(view)):
        names = {address: node for node, address in view.roster}
        lost = names.get(view.lost, "")
        ballot = next_ballot(view.hello.ballot, view.hello.start)
        hello = replace(view.hello, leader=view.hello.address, ballot=ballot)
        view = replace(view, role=Role.LEADING, called_s={}, hints=(), lost="", hello=hello)
        acts = [*acts, events.Lead(lost=lost), *_tell_callers(view)]
    return view, [*acts, *_calls(view, now_s)]


def _tell_callers(view: MembershipView) -> list[events.Act]:
    """Answer those once more that have asked who leads."""
    return [
        events.Tell(peer=peer, message=view.hello)
        for peer, line in view.lines.items()
        if line.address is None and line.join is None
    ]


def _earlier(view: MembershipView) -> list[str]:
    """Return the addresses that have to be asked before this agent leads."""
    others = [address for _, address in view.roster]
    if view.hello.address in others:
        others = others[: others.index(view.hello.address)]
    found = [*view.hints, *([view.lost] if view.lost else []), *(others or view.endpoints)]
    return [each for each in dict.fromkeys(found) if each != view.hello.address]


def _calls(view: MembershipView, now_s: float) -> list[events.Act]:
    """Return the calls that are due."""
    asked = {line.address for line in view.lines.values() if line.address is not None}
    if len(asked) >= _CALLS_MAX:
        return []
    joined = {line.join.address for line in view.lines.values() if line.join is not None}
    if view.role == Role.SEEKING:
        wanted, retry_s = _earlier(view), _RETRY_S
    else:
        known = [address for _, address in view.roster]
        wanted = [*view.hints, *known, *view.endpoints]
        retry_s = _RETRY_LEADING_S
    known_here = asked | joined | {view.hello.address}
    due = [
        each
        for each in dict.fromkeys(wanted)
        if each not in known_here and now_s - view.called_s.get(each, float("-inf")) >= retry_s
    ]
    # Who was not asked for longest comes first: silent ones keep nobody from being asked.
    due.sort(key=lambda each: view.called_s.get(each, float("-inf")))
    return [events.Dial(address=each) for each in due[: _CALLS_MAX - len(asked)]]


def is_before(one: Hello, other: Hello) -> bool:
    """Return whether one agent leads rather than another."""
    return (-one.generation, one.order, one.node) < (-other.generation, other.order, other.node)


def _hear_hello(view: MembershipView, peer: int, hello: Hello, now_s: float) -> Result:
    line = view.lines[peer]
    acts: list[events.Act] = []
    if line.address is None:
        acts.append(events.Tell(peer=peer, message=view.hello))
    if hello.run != view.hello.run:
        view, more = _lose(view, peer, now_s)
        return _and_seek((view, [*acts, events.HangUp(peer=peer), *more]), now_s)
    leads = hello.leader == hello.address
    if view.role == Role.FOLLOWING:
        if peer == view.link and not leads:
            # It has given way to another one.
            view = _drop(view, peer)
            acts.append(events.HangUp(peer=peer))
            return _and_seek((_seek_anew(view, now_s, hint=hello.leader), acts), now_s)
        return _end_call(view, peer, acts)
    if view.role == Role.LEADING:
        gives_way = leads and is_before(hello, view.hello)
        if gives_way and (not view.is_settled or hello.generation > view.hello.generation):
            acts += _resign(view, peer, hello.address)
            view = replace(view, lines={} if line.address is None else {peer: line})
            view = _seek_anew(view, now_s, hint=hello.address)
            return _weigh(view, peer, hello, acts, now_s)
        if hello.leader not in ("", hello.address, view.hello.address):
            view = replace(view, hints=(hello.leader, *view.hints)[:_CALLS_MAX])
        return _and_seek(_end_call(_clear(view, line.address), peer, acts), now_s)
    return _weigh(view, peer, hello, acts, now_s)


def _weigh(
    view: MembershipView, peer: int, hello: Hello, acts: list[events.Act], now_s: float
) -> Result:
    """Decide about an agent that is seeking whether it follows who has said this."""
    line = view.lines.get(peer)
    leads = hello.leader == hello.address
    is_current = hello.generation >= view.hello.generation
    if leads and is_current and line is not None and line.address is not None:
        view = replace(
            view,
            role=Role.FOLLOWING,
            link=peer,
            lost="",
            hints=(),
            beat_s=now_s,
            hello=replace(
                view.hello, leader=hello.address, ballot=max(view.hello.ballot, hello.ballot)
            ),
        )
        return view, [
            *acts,
            events.Tell(peer=peer, message=messages.Beat()),
            events.Follow(start=hello.start),
            *_tell_callers(view),
        ]
    if hello.leader and (is_current or not leads) and hello.leader != view.hello.address:
        view = replace(view, hints=tuple(dict.fromkeys((hello.leader, *view.hints)))[:_CALLS_MAX])
    if is_before(hello, view.hello) and not leads:
        # It will lead, or say who does.
        return _and_seek((view, acts), now_s)
    if not (leads and is_current):
        view = _clear(view, hello.address, line.address if line else None)
    view, acts = _end_call(view, peer, acts)
    return _and_seek((view, acts), now_s)


def _end_call(view: MembershipView, peer: int, acts: list[events.Act]) -> Result:
    """Hang up where this agent has called, and has its answer."""
    line = view.lines.get(peer)
    if line is None or line.address is None or peer == view.link:
        return view, acts
    return _drop(view, peer), [*acts, events.HangUp(peer=peer)]


def _hand_over(view: MembershipView, leader: str, now_s: float) -> Result:
    """Send those that follow this agent, and itself, to one that is to lead instead."""
    if view.role != Role.LEADING:
        return view, []
    acts = _resign(view, kept=-1, leader=leader)
    # Behind all others: they do not wait for its word.
    hello = replace(view.hello, order=2 * NO_ORDER)
    return _and_seek(
        (_seek_anew(replace(view, lines={}, hello=hello), now_s, hint=leader), acts), now_s
    )


def _resign(view: MembershipView, kept: int, leader: str) -> list[events.Act]:
    """Send those that follow this agent to another one."""
    redirect = replace(view.hello, leader=leader)
    acts: list[events.Act] = [events.Resign()]
    for peer, line in view.lines.items():
        if line.address is None:
            acts.append(events.Tell(peer=peer, message=redirect))
        if peer != kept or line.address is None:
            acts.append(events.HangUp(peer=peer))
    return acts


# ---- what others say


def _hear_join(view: MembershipView, peer: int, join: Join, now_s: float) -> Result:
    if view.role != Role.LEADING:
        return view, [events.Tell(peer=peer, message=view.hello)]
    if join.program != view.program:
        reason = f"node {join.node} has {join.program}; the run has {view.program}"
        return view, [
            events.Tell(peer=peer, message=End(status=OTHER_PROGRAM_STATUS, reason=reason))
        ]
    acts: list[events.Act] = []
    others = {key: line.join for key, line in view.lines.items() if key != peer and line.join}
    for key, other in others.items():
        if other.node == join.node and other.start == join.start:
            # The same agent on another connection: the older one has ended for it.
            view, more = _lose(view, key, now_s)
            acts += [events.HangUp(peer=key), *more]
    if join.node == view.hello.node:
        return view, [*acts, _refuse(peer, join.node)]
    return replace(view, waiting={**view.waiting, peer: join}), acts


def _admit(result: Result) -> Result:
    """Let those join whose name no other connection has.

    The agent that has it may have ended unheard, with its host: its next word or its lease tells.
    """
    view, acts = result
    for peer, join in view.waiting.items():
        others = (line.join for key, line in view.lines.items() if key != peer)
        if any(other is not None and other.node == join.node for other in others):
            continue
        view = _with_line(view, peer, replace(view.lines[peer], join=join))
        waiting = {key: each for key, each in view.waiting.items() if key != peer}
        view = replace(view, waiting=waiting)
        acts = [*acts, events.NodeJoined(join=join)]
    return view, acts


def _refuse_others(view: MembershipView, peer: int) -> Result:
    """Refuse those that would join under the name of an agent that was just heard."""
    join = view.lines[peer].join
    if join is None or not view.waiting:
        return view, []
    acts: list[events.Act] = [
        _refuse(key, each.node) for key, each in view.waiting.items() if each.node == join.node
    ]
    waiting = {key: each for key, each in view.waiting.items() if each.node != join.node}
    return replace(view, waiting=waiting), acts


def _refuse(peer: int, node: str) -> events.Tell:
    reason = f"another agent is named {node!r}; set --node-name"
    return events.Tell(peer=peer, message=End(status=TAKEN_NAME_STATUS, reason=reason))


def _hear_goodbye(view: MembershipView, peer: int, goodbye: Goodbye, now_s: float) -> Result:
    view, acts = _lose(view, peer, now_s, is_dead=True)
    return _and_seek((view, [events.HangUp(peer=peer), *acts]), now_s)


def _hear_roster(view: MembershipView, peer: int, beat: messages.Beat, now_s: float) -> Result:
    view = replace(view.with_roster(beat), dead=frozenset())
    if beat.ballot <= view.hello.ballot:
        return view, []
    return replace(view, hello=replace(view.hello, ballot=beat.ballot)), [events.JoinAgain()]


def _hear_proposal(view: MembershipView, peer: int, proposal: Propose, now_s: float) -> Result:
    return view, [proposal] if proposal.ballot == view.hello.ballot else []


def _hear_news(view: MembershipView, peer: int, news: messages.Learn, now_s: float) -> Result:
    # Without these names an agent that leads next might take all others for ended.
    return replace(view, known=view.known | set(news.known)), [news]


def _ignore(view: MembershipView, peer: int, message: Message, now_s: float) -> Result:
    return view, []


def _obey(view: MembershipView, peer: int, order: Message, now_s: float) -> Result:
    return view, [order]


def _pass_on(view: MembershipView, peer: int, message: Message, now_s: float) -> Result:
    join = view.lines[peer].join
    return view, [events.Said(node=join.node, message=message)] if join is not None else []


class Sender(Enum):
    """Other end of a connection, as this agent sees it."""

    COORDINATOR = "a coordinator"
    """This agent follows it."""
    MEMBER = "a member"
    """It has joined this agent, which leads."""
    OTHER = "an agent that has not joined"


_SAID = (messages.Agree, messages.Failed, messages.Stopped, messages.Finished, messages.StateSaved)
_ENDINGS = (messages.Break, messages.Leave, messages.StopRun, messages.LetGo, messages.End)
_ORDERS = (messages.Open, messages.ReplaceRank, messages.SaveState, *_ENDINGS)
_Answer = Callable[[MembershipView, int, Any, float], Result]
_ALL: Mapping[type[Message], _Answer] = {Hello: _hear_hello, Goodbye: _hear_goodbye}
ANSWERS: Mapping[Sender, Mapping[type[Message], _Answer]] = {
    Sender.COORDINATOR: {
        **_ALL,
        messages.Beat: _hear_roster,
        Propose: _hear_proposal,
        messages.Learn: _hear_news,
        **dict.fromkeys(_ORDERS, _obey),
    },
    Sender.MEMBER: {
        **_ALL,
        Join: _hear_join,
        messages.Beat: _ignore,
        **dict.fromkeys(_SAID, _pass_on),
    },
    Sender.OTHER: {
        **_ALL,
        Join: _hear_join,
        # The end of the run, and rosters, are told to all connections. A node that does not know
        # yet that its coordinator has resigned goes on reporting.
        **dict.fromkeys((End, messages.Beat, *_SAID), _ignore),
    },
}
"""Answers by sender and type. A message that is missing here ends its connection."""

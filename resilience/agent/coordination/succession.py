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

from resilience.agent.connections.transport import Came, Gone, Reached
from resilience.agent.coordination.membership import NodeJoined, NodeLost, Said
from resilience.agent.coordination.outlook import (
    FOLLOWING,
    LEADING,
    NO_ORDER,
    SEEKING,
    Act,
    Coordinate,
    Dial,
    Dialed,
    Follow,
    HandedOver,
    HangUp,
    Heeded,
    JoinAgain,
    Lead,
    Line,
    Looked,
    Moved,
    Obey,
    Outlook,
    Resign,
    Result,
    Settled,
    Tell,
)
from resilience.agent.coordination.votes import next_ballot
from resilience.comm.messages import Beat, End, Goodbye, Hello, Join, Learn, Message, Propose

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


def decide(view: Outlook, event: Heeded, now_s: float) -> Result:
    """Return what the agent knows now, and what is to be done."""
    return _admit(_heed(view, event, now_s))


def _heed(view: Outlook, event: Heeded, now_s: float) -> Result:
    if isinstance(event, Came):
        return _with_line(view, event.peer, Line(heard_s=now_s)), []
    if isinstance(event, Dialed):
        view = replace(view, called_s={**view.called_s, event.address: now_s})
        return _with_line(view, event.peer, Line(heard_s=now_s, address=event.address)), []
    if isinstance(event, Moved):
        hello = replace(view.hello, generation=event.generation, order=event.order)
        return replace(view, hello=hello), []
    if isinstance(event, Settled):
        return replace(view, is_settled=event.is_open), []
    if isinstance(event, HandedOver):
        return _hand_over(view, event.address, now_s)
    if isinstance(event, Looked):
        return _look(view, now_s)
    if event.peer not in view.lines:
        return view, []
    if isinstance(event, Reached):
        return _touch(view, event.peer, now_s), [Tell(peer=event.peer, message=view.hello)]
    if isinstance(event, Gone):
        return _and_seek(_lose(view, event.peer, now_s), now_s)
    view, acts = _refuse_others(_touch(view, event.peer, now_s), event.peer)
    answer = _ANSWERS.get(type(event.message), _pass_on)
    view, more = answer(view, event.peer, event.message, now_s)
    return view, [*acts, *more]


# ---- lines


def _with_line(view: Outlook, peer: int, line: Line) -> Outlook:
    return replace(view, lines={**view.lines, peer: line})


def _touch(view: Outlook, peer: int, now_s: float) -> Outlook:
    return _with_line(view, peer, replace(view.lines[peer], heard_s=now_s))


def _drop(view: Outlook, peer: int) -> Outlook:
    waiting = {key: join for key, join in view.waiting.items() if key != peer}
    lines = {key: line for key, line in view.lines.items() if key != peer}
    return replace(view, lines=lines, waiting=waiting)


def _clear(view: Outlook, *addresses: str | None) -> Outlook:
    hints = tuple(each for each in view.hints if each not in addresses)
    cleared = view.cleared | {each for each in addresses if each is not None}
    return replace(view, hints=hints, cleared=cleared)


def _lose(
    view: Outlook, peer: int, now_s: float, *, is_dead: bool = False, is_silent: bool = False
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
    if line.join is not None and view.stage == LEADING:
        lost = NodeLost(node=line.join.node, is_dead=is_dead)
        return view, [Coordinate(event=lost)]
    return view, []


def _look(view: Outlook, now_s: float) -> Result:
    """End the leases of those that were silent, and renew the agent's own."""
    if now_s - view.tick_s > view.lease_s / 2:
        # It was this agent that stood still: what the others have said is still unread.
        lines = {peer: replace(line, heard_s=now_s) for peer, line in view.lines.items()}
        view = replace(view, lines=lines)
    view = replace(view, tick_s=now_s)
    acts: list[Act] = []
    for peer, line in view.lines.items():
        if now_s - line.heard_s > view.lease_s:
            view, more = _lose(view, peer, now_s, is_silent=True)
            acts += [HangUp(peer=peer), *more]
    link = view.link
    if link is not None and now_s - view.beat_s >= view.beat_every_s:
        view = replace(view, beat_s=now_s)
        acts.append(Tell(peer=link, message=Beat()))
    return _and_seek((view, acts), now_s)


# ---- who leads


def _seek_anew(
    view: Outlook, now_s: float, *, lost: str = "", hint: str = "", is_dead: bool = False
) -> Outlook:
    """Follow nobody, and lead no longer."""
    names = {address: node for node, address in view.roster}
    return replace(
        view,
        stage=SEEKING,
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
    if view.stage == FOLLOWING or (view.stage == LEADING and view.is_settled):
        return view, acts
    is_found = bool(view.roster) or view.hello.address in view.endpoints
    if view.stage == SEEKING and is_found and view.cleared.issuperset(_earlier(view)):
        names = {address: node for node, address in view.roster}
        lost = names.get(view.lost, "")
        ballot = next_ballot(view.hello.ballot, view.hello.start)
        hello = replace(view.hello, leader=view.hello.address, ballot=ballot)
        view = replace(view, stage=LEADING, called_s={}, hints=(), lost="", hello=hello)
        acts = [*acts, Lead(lost=lost), *_tell_callers(view)]
    return view, [*acts, *_calls(view, now_s)]


def _tell_callers(view: Outlook) -> list[Act]:
    """Answer those once more that have asked who leads."""
    return [
        Tell(peer=peer, message=view.hello)
        for peer, line in view.lines.items()
        if line.address is None and line.join is None
    ]


def _earlier(view: Outlook) -> list[str]:
    """Return the addresses that have to be asked before this agent leads."""
    others = [address for _, address in view.roster]
    if view.hello.address in others:
        others = others[: others.index(view.hello.address)]
    found = [*view.hints, *([view.lost] if view.lost else []), *(others or view.endpoints)]
    return [each for each in dict.fromkeys(found) if each != view.hello.address]


def _calls(view: Outlook, now_s: float) -> list[Act]:
    """Return the calls that are due."""
    asked = {line.address for line in view.lines.values() if line.address is not None}
    if len(asked) >= _CALLS_MAX:
        return []
    joined = {line.join.address for line in view.lines.values() if line.join is not None}
    if view.stage == SEEKING:
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
    return [Dial(address=each) for each in due[: _CALLS_MAX - len(asked)]]


def is_before(one: Hello, other: Hello) -> bool:
    """Return whether one agent leads rather than another."""
    return (-one.generation, one.order, one.node) < (-other.generation, other.order, other.node)


def _hear_hello(view: Outlook, peer: int, hello: Message, now_s: float) -> Result:
    assert isinstance(hello, Hello)
    line = view.lines[peer]
    acts: list[Act] = []
    if line.address is None:
        acts.append(Tell(peer=peer, message=view.hello))
    if hello.run != view.hello.run:
        view, more = _lose(view, peer, now_s)
        return _and_seek((view, [*acts, HangUp(peer=peer), *more]), now_s)
    leads = hello.leader == hello.address
    if view.stage == FOLLOWING:
        if peer == view.link and not leads:
            # It has given way to another one.
            view = _drop(view, peer)
            acts.append(HangUp(peer=peer))
            return _and_seek((_seek_anew(view, now_s, hint=hello.leader), acts), now_s)
        return _end_call(view, peer, acts)
    if view.stage == LEADING:
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


def _weigh(view: Outlook, peer: int, hello: Hello, acts: list[Act], now_s: float) -> Result:
    """Decide about an agent that is seeking whether it follows who has said this."""
    line = view.lines.get(peer)
    leads = hello.leader == hello.address
    is_current = hello.generation >= view.hello.generation
    if leads and is_current and line is not None and line.address is not None:
        view = replace(
            view,
            stage=FOLLOWING,
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
            Tell(peer=peer, message=Beat()),
            Follow(start=hello.start),
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


def _end_call(view: Outlook, peer: int, acts: list[Act]) -> Result:
    """Hang up where this agent has called, and has its answer."""
    line = view.lines.get(peer)
    if line is None or line.address is None or peer == view.link:
        return view, acts
    return _drop(view, peer), [*acts, HangUp(peer=peer)]


def _hand_over(view: Outlook, leader: str, now_s: float) -> Result:
    """Send those that follow this agent, and itself, to one that is to lead instead."""
    if view.stage != LEADING:
        return view, []
    acts = _resign(view, kept=-1, leader=leader)
    # Behind all others: they do not wait for its word.
    hello = replace(view.hello, order=2 * NO_ORDER)
    return _and_seek(
        (_seek_anew(replace(view, lines={}, hello=hello), now_s, hint=leader), acts), now_s
    )


def _resign(view: Outlook, kept: int, leader: str) -> list[Act]:
    """Send those that follow this agent to another one."""
    redirect = replace(view.hello, leader=leader)
    acts: list[Act] = [Resign()]
    for peer, line in view.lines.items():
        if line.address is None:
            acts.append(Tell(peer=peer, message=redirect))
        if peer != kept or line.address is None:
            acts.append(HangUp(peer=peer))
    return acts


# ---- what others say


def _hear_join(view: Outlook, peer: int, join: Message, now_s: float) -> Result:
    assert isinstance(join, Join)
    if view.stage != LEADING:
        return view, [Tell(peer=peer, message=view.hello)]
    if join.program != view.program:
        reason = f"node {join.node} has {join.program}; the run has {view.program}"
        return view, [Tell(peer=peer, message=End(status=OTHER_PROGRAM_STATUS, reason=reason))]
    acts: list[Act] = []
    others = {key: line.join for key, line in view.lines.items() if key != peer and line.join}
    for key, other in others.items():
        if other.node == join.node and other.start == join.start:
            # The same agent on another connection: the older one has ended for it.
            view, more = _lose(view, key, now_s)
            acts += [HangUp(peer=key), *more]
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
        acts = [*acts, Coordinate(event=NodeJoined(join=join))]
    return view, acts


def _refuse_others(view: Outlook, peer: int) -> Result:
    """Refuse those that would join under the name of an agent that was just heard."""
    join = view.lines[peer].join
    if join is None or not view.waiting:
        return view, []
    acts: list[Act] = [
        _refuse(key, each.node) for key, each in view.waiting.items() if each.node == join.node
    ]
    waiting = {key: each for key, each in view.waiting.items() if each.node != join.node}
    return replace(view, waiting=waiting), acts


def _refuse(peer: int, node: str) -> Tell:
    reason = f"another agent is named {node!r}; set --node-name"
    return Tell(peer=peer, message=End(status=TAKEN_NAME_STATUS, reason=reason))


def _hear_goodbye(view: Outlook, peer: int, goodbye: Message, now_s: float) -> Result:
    view, acts = _lose(view, peer, now_s, is_dead=True)
    return _and_seek((view, [HangUp(peer=peer), *acts]), now_s)


def _hear_beat(view: Outlook, peer: int, beat: Message, now_s: float) -> Result:
    assert isinstance(beat, Beat)
    if peer != view.link:
        return view, []
    names = [name for name, _ in beat.nodes]
    view = replace(
        view,
        roster=beat.nodes or view.roster,
        known=view.known | set(names),
        starts={**view.starts, **dict(zip(names, beat.starts, strict=False))},
        dead=frozenset(),
    )
    if beat.ballot <= view.hello.ballot:
        return view, []
    return replace(view, hello=replace(view.hello, ballot=beat.ballot)), [JoinAgain()]


def _hear_proposal(view: Outlook, peer: int, proposal: Message, now_s: float) -> Result:
    assert isinstance(proposal, Propose)
    is_promised = peer == view.link and proposal.ballot == view.hello.ballot
    return view, [Obey(message=proposal)] if is_promised else []


def _pass_on(view: Outlook, peer: int, message: Message, now_s: float) -> Result:
    join = view.lines[peer].join
    if peer == view.link:
        if isinstance(message, Learn):
            # Without these names an agent that leads next might take all others for ended.
            view = replace(view, known=view.known | set(message.known))
        return view, [Obey(message=message)]
    if join is not None and view.stage == LEADING:
        return view, [Coordinate(event=Said(node=join.node, message=message))]
    return view, []


_ANSWERS: Mapping[type[Message], Callable[[Outlook, int, Message, float], Result]] = {
    Hello: _hear_hello,
    Join: _hear_join,
    Goodbye: _hear_goodbye,
    Beat: _hear_beat,
    Propose: _hear_proposal,
}

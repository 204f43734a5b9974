"""Events for the coordinator in few words, and what it decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from resilience.agent.coordination.coordinator import decide
from resilience.agent.coordination.events import (
    Action,
    Claimed,
    ClaimRecord,
    Event,
    FoundRun,
    Judged,
    NodeJoined,
    NodeLost,
    Recorded,
    Said,
    Send,
)
from resilience.agent.coordination.founding import Record, judge
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.votes import find_ended
from resilience.comm.messages import (
    Agree,
    Break,
    End,
    Failed,
    Finished,
    Join,
    Learn,
    Open,
    Propose,
    Stopped,
)
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, Report

OPTIONS = Options(num_nodes=2, num_local_ranks=2, restarts_without_progress_max=2, restarts_max=3)


def layout(*nodes: str) -> Layout:
    plain = make_layout(nodes=nodes, num_local_ranks=OPTIONS.num_local_ranks)
    return replace(plain, starts=nodes)


def join(node: str, generation: int = -1, nodes: Sequence[str] = ()) -> NodeJoined:
    """Return the join of a node that has seen a generation of these nodes."""
    known = layout(*nodes) if nodes else None
    return NodeJoined(
        join=Join(
            node=node,
            address=f"{node}:1",
            start=node,
            generation=generation,
            layout=known,
            opened=generation,
            shares_folder=True,
        )
    )


def apart(node: str) -> NodeJoined:
    """Return the join of a node that does not see the folder of the run."""
    return NodeJoined(join=replace(join(node).join, shares_folder=False))


def lost(node: str, *, is_dead: bool = True) -> NodeLost:
    return NodeLost(node=node, is_dead=is_dead)


def failed(node: str, rank: int, generation: int = 0, reason: str = "exception") -> Said:
    text = f"rank {rank}: {reason}"
    return Said(
        node=node, message=Failed(generation=generation, rank=rank, reason=reason, text=text)
    )


def stopped(
    node: str,
    rank: int,
    generation: int = 0,
    step: int | None = 5,
    rest: Mapping[str, Any] | None = None,
) -> Said:
    report = Report(
        rank=rank,
        node=node,
        generation=generation,
        member_generation=-1 if step is None else generation,
        phase=Phase.FRESH if step is None else Phase.COMPUTING,
        step=step or 0,
        rest=rest or {},
    )
    message = Stopped(generation=generation, rank=rank, report=report.to_json())
    return Said(node=node, message=message)


def finished(node: str, rank: int, generation: int = 0, status: int = 0, text: str = "") -> Said:
    message = Finished(generation=generation, rank=rank, status=status, text=text)
    return Said(node=node, message=message)


def all_stopped(generation: int = 0, *, but: Iterable[int] = (), step: int = 5) -> list[Said]:
    return [
        stopped(f"n{rank // 2}", rank, generation, step) for rank in range(4) if rank not in but
    ]


def places(
    *numbers: int,
    generation: int = 0,
    step: int | None = 5,
    rest: Mapping[str, Any] | None = None,
) -> list[Said]:
    """Return the reports of all ranks of places, whose nodes are named after them."""
    return [
        stopped(f"n{place}", 2 * place + each, generation, step, rest)
        for place in numbers
        for each in (0, 1)
    ]


def play(state: State, *events: Event, now_s: float = 0.0) -> tuple[State, list[Action]]:
    """Return the state after all events, and all that was to be done.

    Agents agree and promise at once, and the folder answers at once.
    """
    actions: list[Action] = []
    inbox = deque(events)
    while inbox:
        before = state.ballot
        state, more = take(state, inbox.popleft(), now_s)
        actions += more
        if state.ballot != before:
            inbox.extendleft(promise(state, *state.present))
        inbox.extendleft(reversed([each for action in more for each in _answers(action)]))
        if not inbox and (record := find_unread(state)):
            inbox.append(record)
    return state, actions


def hear(state: State, *events: Event, now_s: float = 0.0) -> tuple[State, list[Action]]:
    """Return the same where nobody answers."""
    actions: list[Action] = []
    for event in events:
        state, more = take(state, event, now_s)
        actions += more
    return state, actions


def find_unread(state: State) -> Recorded | None:
    """Return the record of the run, with nothing new in it, where it is to be read."""
    ended = find_ended(state)
    if state.stage != Stage.STOPPING or not state.shares_folder or state.read_after == ended:
        return None
    return Recorded(generation=state.recorded, starts=state.recorded_starts, after=ended)


def _answers(action: Action) -> list[Event]:
    if isinstance(action, ClaimRecord):
        return [Claimed(generation=action.generation, layout=action.layout)]
    if isinstance(action, FoundRun):
        record = judge(None, run="run", newcomers=action.agents, unchanged_s=0.0)
        return [Judged(record=record)] if isinstance(record, Record) else []
    if isinstance(action, Send) and isinstance(action.message, Propose):
        proposal = action.message
        agreement = Agree(generation=proposal.generation, ballot=proposal.ballot)
        return [Said(node=action.node, message=agreement)]
    return []


def take(state: State, event: Event, now_s: float) -> tuple[State, list[Action]]:
    """Decide about an event; who joins has heard of the coordinator's ballot."""
    if isinstance(event, NodeJoined) and event.join.promised < state.ballot:
        event = NodeJoined(join=replace(event.join, promised=state.ballot))
    return decide(state, event, now_s)


def promise(state: State, *nodes: str) -> list[NodeJoined]:
    """Return what agents say that hear of the coordinator's ballot."""
    joins = [state.present[node] for node in nodes]
    return [NodeJoined(join=replace(each, promised=state.ballot)) for each in joins]


def bound(joined: NodeJoined, number: int, agreed: Layout) -> NodeJoined:
    """Return the join of an agent that has agreed to something under another coordinator."""
    ballot = (number, "another")
    join = replace(joined.join, promised=ballot, ballot=ballot, agreed=agreed)
    return NodeJoined(join=join)


def running(options: Options = OPTIONS, *more: str) -> State:
    state, _ = play(State(options=options), join("n0"), join("n1"), *map(join, more))
    assert state.stage == Stage.RUNNING
    return state


def opened(actions: Iterable[Action]) -> list[Open]:
    sent = [each.message for each in actions if isinstance(each, Send)]
    return [each for each in sent if isinstance(each, Open)]


def ends(actions: Iterable[Action]) -> list[End]:
    sent = [each.message for each in actions if isinstance(each, Send)]
    return [each for each in sent if isinstance(each, End)]


def broken(actions: Iterable[Action]) -> list[str]:
    return [
        each.node for each in actions if isinstance(each, Send) and isinstance(each.message, Break)
    ]


def phases(opening: Open) -> list[str]:
    return [report.phase.value for report in opening.read_reports()]


def learned(actions: Iterable[Action]) -> list[str]:
    return [
        each.node for each in actions if isinstance(each, Send) and isinstance(each.message, Learn)
    ]


def proposed(actions: Iterable[Action]) -> list[Propose]:
    sent = [each.message for each in actions if isinstance(each, Send)]
    return [each for each in sent if isinstance(each, Propose)]

"""Who numbers generations: decides from what nodes and ranks say, and from the time. Pure.

One agent's process runs the coordinator; the others are told. A generation g
ends at its first fault: every node is told to break it, every rank reports what
it holds, and when all ranks have reported, or have been replaced by processes
that hold nothing, g+1 opens with those reports. Nothing else ever opens one, so
at most one generation can commit steps.

A node whose connection was closed is dead: its processes end with their agent.
One that is only silent may live on behind a broken network, so a generation
opens only where more than half of the agents are at hand that may still live.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from resilience.agent.coordination.counters import count, find_end
from resilience.agent.coordination.membership import (
    ENDED,
    GATHERING,
    GAVE_UP_STATUS,
    RUNNING,
    STOPPING,
    Action,
    Decision,
    Event,
    NodeJoined,
    NodeLost,
    Note,
    Options,
    Replace,
    Said,
    Send,
    State,
)
from resilience.comm.messages import Break, End, Failed, Finished, Join, Message, Open, Stopped
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, Report, fresh_report


def decide(state: State, event: Event, now_s: float) -> Decision:
    """Return the next state and what is to be done."""
    if state.stage == ENDED:
        return state, []
    if isinstance(event, NodeJoined):
        return _join(state, event.join, now_s)
    if isinstance(event, NodeLost):
        return _lose(state, event, now_s)
    if isinstance(event, Said):
        return _SAID.get(type(event.message), _ignored)(state, event, now_s)
    return _tick(state, now_s)


def take_over(
    options: Options,
    *,
    generation: int,
    layout: Layout | None,
    lost: str,
    silent: Collection[str] = (),
    now_s: float,
) -> State:
    """Return the state of a coordinator that follows a lost one.

    `silent` are the agents that may still live; who comes is silent no more.
    """
    if layout is None:
        return State(options=options, since_s=now_s, silent=frozenset(silent))
    return State(
        options=options,
        stage=STOPPING,
        since_s=now_s,
        generation=generation,
        layout=layout,
        nodes=(None,) * len(layout.nodes),
        awaited=frozenset(place for place, node in enumerate(layout.nodes) if node != lost),
        silent=frozenset(silent),
    )


def next_deadline_s(state: State) -> float:
    """Return when a tick is due; the coordinator may be woken earlier."""
    options = state.options
    waits = {
        GATHERING: min(options.last_call_s, options.join_deadline_s),
        STOPPING: options.regroup_s,
        RUNNING: options.stop_deadline_s,
    }
    return state.since_s + waits.get(state.stage, options.join_deadline_s)


# ---- nodes


def _join(state: State, join: Join, now_s: float) -> Decision:
    state = replace(
        state,
        present={**state.present, join.node: join},
        silent=state.silent - {join.node},
    )
    note = Note(event="node_joined", fields={"node": join.node})
    # Once it has opened one itself, a generation that it missed is another history, and is over.
    is_regrouping = state.stage in (GATHERING, STOPPING) and state.first_failure is None
    is_newer = join.index >= 0 and join.generation > state.generation
    if is_regrouping and is_newer and join.layout is not None:
        state = _adopt(state, join.generation, join.layout, now_s)
    # Its place in the generation that ends here, whatever place it had in an older one.
    place = state.members.index_of(join.node) if state.awaited else -1
    if place in state.awaited:
        if join.generation == state.generation:
            return _after([note], _regain(state, join))
        # The others went on without this node: what it holds counts as nothing.
        state = replace(state, awaited=state.awaited - {place})
    return _after([note], _advance(state, now_s))


def _adopt(state: State, generation: int, layout: Layout, now_s: float) -> State:
    """Learn from a member of a newer generation that there is one.

    The coordinator was a standby, or the one before it was lost while it opened
    that generation. Nodes that have come from older ones are standbys now.
    """
    return replace(
        state,
        stage=STOPPING,
        since_s=now_s,
        generation=generation,
        layout=layout,
        nodes=(None,) * len(layout.nodes),
        awaited=frozenset(range(len(layout.nodes))),
        reports={},
        finished={},
    )


def _regain(state: State, join: Join) -> Decision:
    """Take back a member that a lost coordinator had."""
    nodes = tuple(
        join.node if place == join.index else node for place, node in enumerate(state.nodes)
    )
    state = replace(state, nodes=nodes, awaited=state.awaited - {join.index})
    order = Break(generation=state.generation, reason="the coordinator was lost")
    return state, [Send(node=join.node, message=order)]


def _lose(state: State, event: NodeLost, now_s: float) -> Decision:
    present = {name: join for name, join in state.present.items() if name != event.node}
    silent = state.silent if event.is_dead else state.silent | {event.node}
    state = replace(state, present=present, silent=silent)
    note = Note(event="node_lost", fields={"node": event.node, "is_dead": event.is_dead})
    if event.node not in state.nodes:
        return _lose_majority(state, [note], now_s)
    ranks = state.members.ranks_of(state.nodes.index(event.node))
    nodes = tuple(None if name == event.node else name for name in state.nodes)
    state = replace(
        state,
        nodes=nodes,
        reports={rank: each for rank, each in state.reports.items() if rank not in ranks},
        finished={rank: each for rank, each in state.finished.items() if rank not in ranks},
    )
    if state.stage == RUNNING:
        failed = Failed(
            generation=state.generation,
            rank=ranks[0],
            reason="node lost",
            text=f"{event.node} with ranks {ranks[0]} to {ranks[-1]} is gone",
        )
        state, actions = _stop(state, failed, now_s)
        return _after([note, *actions], _advance(state, now_s))
    return _after([note], _advance(state, now_s))


def _lose_majority(state: State, actions: list[Action], now_s: float) -> Decision:
    """Stop a generation whose silent agents could open another one elsewhere."""
    if state.stage != RUNNING or len(state.present) > len(state.silent):
        return state, actions
    text = f"{len(state.silent)} agents are silent, and may go on elsewhere as the majority"
    failed = Failed(generation=state.generation, rank=0, reason="node lost", text=text)
    return _after(actions, _stop(state, failed, now_s))


# ---- what ranks say


def _failed(state: State, event: Said, now_s: float) -> Decision:
    failed = event.message
    assert isinstance(failed, Failed)
    if failed.generation != state.generation or not state.owns(event.node, failed.rank):
        return state, []
    if state.stage == RUNNING:
        return _stop(state, failed, now_s)
    # A second fault while the first is dealt with: its rank reports what it holds, as all do.
    if failed.reason in _REPLACED:
        # What its process had reported is gone with it; the one that follows reports anew.
        others = {rank: each for rank, each in state.reports.items() if rank != failed.rank}
        state = replace(state, restarts_s=(*state.restarts_s, now_s), reports=others)
    return state, [_detected(failed)]


def _stop(state: State, failed: Failed, now_s: float) -> Decision:
    """End the generation for everybody."""
    in_process = dict(state.in_process)
    restarts_s = state.restarts_s
    if failed.reason in _REPLACED:
        restarts_s = (*restarts_s, now_s)
    is_own = failed.reason not in (*_REPLACED, _CONSEQUENCE)
    if is_own:
        in_process[failed.rank] = in_process.get(failed.rank, 0) + 1
    order = Break(generation=state.generation, reason=failed.text)
    actions: list[Action] = [
        _detected(failed),
        Note(event="generation_broken", fields={"reason": failed.text}),
        *(Send(node=node, message=order) for node in state.nodes if node is not None),
    ]
    place = state.members.seat(failed.rank).node_index
    replacing: frozenset[int] = frozenset()
    is_repeated = is_own and in_process[failed.rank] >= 2
    if is_repeated and (node := state.nodes[place]) is not None:
        reason = "faults again and again in one process"
        actions.append(Replace(node=node, rank=failed.rank, reason=reason))
        replacing = frozenset({failed.rank})
    state = replace(
        state,
        replacing=replacing,
        stage=STOPPING,
        since_s=now_s,
        reports={},
        finished={},
        restarts_s=restarts_s,
        in_process=in_process,
        first_failure=failed,
    )
    if not state.options.recovers and (end := find_end(state)):
        # Nobody is told to begin afresh.
        return _after(actions[:1], _end(state, end.status, end.reason))
    return state, actions


_REPLACED = ("died", "hung", "node lost")
_CONSEQUENCE = "group"
"""A connection has ended: the rank that says so first may be the last that holds its shard."""


def _detected(failed: Failed) -> Note:
    fields = {"reason": failed.reason, "text": failed.text}
    return Note(event="fault_detected", rank=failed.rank, fields=fields)


def _stopped(state: State, event: Said, now_s: float) -> Decision:
    stopped = event.message
    assert isinstance(stopped, Stopped)
    if stopped.generation != state.generation or not state.owns(event.node, stopped.rank):
        return state, []
    actions: list[Action] = []
    if state.stage == RUNNING:
        text = f"rank {stopped.rank} has stopped"
        failed = Failed(
            generation=state.generation, rank=stopped.rank, reason="exception", text=text
        )
        state, actions = _stop(state, failed, now_s)
    report = Report.from_json(stopped.report)
    if stopped.rank in state.replacing and report.phase is not Phase.FRESH:
        return state, actions
    state = replace(state, reports={**state.reports, stopped.rank: report})
    return _after(actions, _advance(state, now_s))


def _finished(state: State, event: Said, now_s: float) -> Decision:
    finished = event.message
    assert isinstance(finished, Finished)
    if finished.status and finished.text:
        if event.node in state.nodes or state.stage == GATHERING:
            return _end(state, finished.status, f"rank {finished.rank}: {finished.text}")
        return state, []
    is_current = finished.generation == state.generation and state.stage == RUNNING
    if not is_current or not state.owns(event.node, finished.rank):
        return state, []
    is_first = not state.finished
    state = replace(state, finished={**state.finished, finished.rank: finished})
    if is_first:
        state = replace(state, since_s=now_s)
    if len(state.finished) < state.members.world_size:
        return state, []
    status = max(each.status for each in state.finished.values())
    return _end(state, status, "all ranks have finished")


def _ignored(state: State, event: Said, now_s: float) -> Decision:
    return state, []


_SAID: dict[type[Message], Callable[[State, Said, float], Decision]] = {
    Failed: _failed,
    Stopped: _stopped,
    Finished: _finished,
    Join: _ignored,
}


# ---- stages


def _tick(state: State, now_s: float) -> Decision:
    waited_s = now_s - state.since_s
    if state.stage == STOPPING and state.awaited and waited_s >= state.options.regroup_s:
        state = replace(state, awaited=frozenset())
    status = max((each.status for each in state.finished.values()), default=0)
    if state.stage == RUNNING and status and waited_s >= state.options.stop_deadline_s:
        return _end(state, status, "some ranks were stopped, and the others did not follow")
    if state.stage in (GATHERING, STOPPING):
        state, actions = _advance(state, now_s)
        if state.stage in (GATHERING, STOPPING) and waited_s >= _patience_s(state):
            return _after(actions, _end(state, GAVE_UP_STATUS, _missing(state)))
        return state, actions
    return state, []


def _patience_s(state: State) -> float:
    options = state.options
    return options.join_deadline_s + (options.stop_deadline_s if state.stage == STOPPING else 0.0)


def _missing(state: State) -> str:
    options = state.options
    if state.stage == GATHERING:
        names = ", ".join(state.present) or "none"
        if len(state.present) >= options.num_nodes:
            return _no_majority(state)
        return (
            f"{len(state.present)} of {options.num_nodes} nodes joined within "
            f"{options.join_deadline_s:g} s ({names}); look at the logs of those that did not"
        )
    places = [str(place) for place, node in enumerate(state.nodes) if node is None]
    if places:
        advice = "start more with --standby-nodes" if options.recovers else "start it again"
        return (
            f"no node took the place of lost node {', '.join(places)} within "
            f"{_patience_s(state):g} s; {advice}"
        )
    ranks = [rank for rank in range(state.members.world_size) if rank not in state.reports]
    if ranks:
        return f"ranks {ranks} neither stopped nor were replaced within {_patience_s(state):g} s"
    return _no_majority(state)


def _no_majority(state: State) -> str:
    return (
        f"{len(state.present)} agents are here and {len(state.silent)} are silent, which is no "
        "majority; they may go on elsewhere"
    )


def _advance(state: State, now_s: float) -> Decision:
    """Open the next generation if all that it needs is there."""
    if state.stage == GATHERING:
        options = state.options
        is_complete = len(state.present) >= options.num_nodes + options.num_standby_nodes
        is_last_call_over = now_s - state.since_s >= options.last_call_s
        if len(state.present) < options.num_nodes or not (is_complete or is_last_call_over):
            return state, []
        if len(state.present) <= len(state.silent):
            return state, []
        layout = make_layout(
            nodes=sorted(state.present)[: options.num_nodes],
            num_local_ranks=options.num_local_ranks,
            num_shards=options.num_shards,
            is_sharded=options.is_sharded,
        )
        ranks = range(layout.world_size)
        reports = {rank: fresh_report(layout, rank, state.generation) for rank in ranks}
        return _open(replace(state, layout=layout, nodes=layout.nodes, reports=reports), now_s)
    if state.stage != STOPPING:
        return state, []
    state = _fill_places(state)
    is_whole = None not in state.nodes and len(state.reports) == state.members.world_size
    if not is_whole or len(state.present) <= len(state.silent):
        return state, []
    return _open(state, now_s)


def _fill_places(state: State) -> State:
    """Give the place of a lost node to one that waits; its ranks hold nothing."""
    nodes = list(state.nodes)
    standby = [name for name in state.present if name not in nodes]
    for place, node in enumerate(state.nodes):
        if node is None and place not in state.awaited and standby:
            nodes[place] = standby.pop(0)
    fresh = {
        rank: replace(fresh_report(state.members, rank, state.generation), node=node)
        for place, node in enumerate(nodes)
        if node is not None and node != state.nodes[place]
        for rank in state.members.ranks_of(place)
    }
    return replace(state, nodes=tuple(nodes), reports={**state.reports, **fresh})


def _open(state: State, now_s: float) -> Decision:
    state = count(state, now_s)
    if end := find_end(state):
        return _end(state, end.status, end.reason)
    nodes = tuple(node for node in state.nodes if node is not None)
    generation, layout = state.generation + 1, replace(state.members, nodes=nodes)
    reports = tuple(state.reports[rank].to_json() for rank in range(layout.world_size))
    actions: list[Action] = [
        Note(
            event="generation_opened",
            fields={"number": generation, "world_size": layout.world_size},
        )
    ]
    for place, node in enumerate(layout.nodes):
        opening = Open(
            generation=generation,
            rank=layout.ranks_of(place).start,
            local_rank=0,
            layout=layout,
            store="",
            reports=reports,
        )
        actions.append(Send(node=node, message=opening))
    state = replace(
        state,
        stage=RUNNING,
        since_s=now_s,
        generation=generation,
        layout=layout,
        reports={},
        finished={},
        awaited=frozenset(),
        silent=frozenset(),
        replacing=frozenset(),
    )
    return state, actions


def _end(state: State, status: int, reason: str) -> Decision:
    actions: list[Action] = []
    if status == GAVE_UP_STATUS:
        actions.append(Note(event="gave_up", fields={"reason": reason}))
    end = End(status=status, reason=reason)
    actions += [Send(node=node, message=end) for node in state.present]
    return replace(state, stage=ENDED, ending=end), actions


def _after(before: list[Action], decision: Decision) -> Decision:
    """Return a decision whose actions come after others."""
    state, actions = decision
    return state, [*before, *actions]

"""Who numbers generations: decides from what nodes and ranks say, and from the time. Pure.

One agent's process runs the coordinator; the others are told. A generation g
ends at its first fault: every node is told to break it, every rank reports what
it holds, and when all ranks have reported, or have been replaced by processes
that hold nothing, g+1 opens with those reports. Nothing else ever opens one, so
at most one generation can commit steps.

Silence is not death: an agent that answers nothing, or whose connection has ended
without a goodbye, may live on behind a broken network, or stand still. Who may go
on without it is decided in `votes`, how the next generation opens in `opening`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from resilience.agent.coordination.counters import say_where
from resilience.agent.coordination.founding import RENEWAL_S
from resilience.agent.coordination.membership import (
    AGREEING,
    ENDED,
    GATHERING,
    RUNNING,
    STOPPING,
    Action,
    Claimed,
    Decision,
    Event,
    Judged,
    NodeEnded,
    NodeJoined,
    NodeLost,
    Note,
    Options,
    Recorded,
    Said,
    Send,
    State,
    after,
)
from resilience.agent.coordination.opening import (
    advance,
    agree,
    end_run,
    find_last_call_s,
    learn,
    note_told,
    refuse,
    withdraw,
)
from resilience.agent.coordination.patience import wait
from resilience.agent.coordination.ranks import note_failed, note_finished, note_stopped, stop
from resilience.agent.coordination.side_save import note_saved
from resilience.agent.coordination.size import look_at_size, next_look_s
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.votes import find_doubted, in_later_ballot
from resilience.comm.messages import (
    GAVE_UP_STATUS,
    Agree,
    Break,
    Failed,
    Finished,
    Join,
    Message,
    StateSaved,
    Stopped,
)
from resilience.elastic.policy import Sizing, note_came, note_left


def decide(state: State, event: Event, now_s: float) -> Decision:
    """Return the next state and what is to be done."""
    if state.stage == ENDED:
        return state, []
    if isinstance(event, NodeJoined):
        return _join(state, event.join, now_s)
    if isinstance(event, NodeLost):
        return _lose(state, event, now_s)
    if isinstance(event, NodeEnded):
        return _note_end(state, event, now_s)
    if isinstance(event, Claimed):
        return _take_record(state, event, now_s)
    if isinstance(event, Recorded):
        return _note_record(state, event, now_s)
    if isinstance(event, Judged):
        state = replace(state, founding=event.record, is_claiming=False)
        if event.record:
            # Who has left since may have begun it with others before; who has not joins again.
            promised = [each.promised for each in state.present.values()]
            return advance(in_later_ballot(state, *promised), now_s)
        return refuse(replace(state, answered_s=now_s), event.reason)
    if isinstance(event, Said):
        hear = _SAID.get(type(event.message))
        return hear(state, event, now_s) if hear else (state, [])
    return _tick(state, now_s)


def take_over(
    options: Options,
    standing: Standing,
    *,
    lost: str,
    dead: Collection[str] = (),
    known: Collection[str] = (),
    now_s: float,
) -> State:
    """Return the state of a coordinator that follows a lost one; its own agent has the standing.

    `dead` are agents that have said goodbye, `known` all that were ever heard of.
    """
    ended = frozenset(dead)
    state = State(options=options, since_s=now_s, dead=ended, gone=ended, known=frozenset(known))
    layout = standing.layout
    if layout is None:
        return state
    return replace(
        state,
        stage=STOPPING,
        generation=standing.generation,
        opened=standing.opened,
        layout=layout,
        nodes=(None,) * len(layout.nodes),
        awaited=frozenset(place for place, node in enumerate(layout.nodes) if node != lost),
        # Of what was before it knows nothing.
        sizing=Sizing(changed_s=now_s),
        shares_folder=standing.shares_folder,
    )


def next_deadline_s(state: State, now_s: float) -> float:
    """Return when a tick is due; the coordinator may be woken earlier."""
    options = state.options
    if state.stage == GATHERING:
        return find_last_call_s(state)
    look_s = next_look_s(state, now_s) if state.stage == RUNNING else float("inf")
    waits = {
        STOPPING: options.lease_s,
        # Looked after also where nothing happens: the record of the run is renewed then.
        RUNNING: min(options.last_save_deadline_s, options.stop_deadline_s, RENEWAL_S),
    }
    return min(look_s, state.since_s + waits.get(state.stage, options.join_deadline_s))


# ---- nodes


def _join(state: State, join: Join, now_s: float) -> Decision:
    before = state.present.get(join.node)
    is_again = before is not None
    if before is not None and join.generation < before.generation:
        # It was told of that generation meanwhile.
        join = replace(
            before,
            promised=join.promised,
            shares_folder=join.shares_folder,
            leaves_within_s=join.leaves_within_s,
        )
    asked_s = dict(state.asked_s)
    if join.leaves_within_s is None or state.starts.get(join.node) != join.start:
        asked_s.pop(join.node, None)
    if join.leaves_within_s is not None:
        asked_s.setdefault(join.node, now_s)
    state = replace(
        state,
        asked_s=asked_s,
        present={**state.present, join.node: join},
        known=state.known | {join.node, *join.known},
        starts={**state.starts, join.node: join.start},
        # Who joins again is whom it was, and a member of its name that has ended before has ended.
        dead=state.dead if is_again else state.dead - {join.node},
        gone=state.gone - {join.node},
        sizing=note_came(state.sizing, join.node, now_s),
    )
    actions: list[Action] = []
    if not is_again:
        state = replace(state, came_s=now_s)
        actions = [Note(event="node_joined", fields={"node": join.node})]
    if state.stage == RUNNING:
        actions.append(Send(node=join.node, message=learn(state)))
        return after(actions, look_at_size(note_told(state, join.node), now_s))
    state = withdraw(state, join.node)
    if is_again:
        # It tells in a later ballot what it has agreed to.
        return advance(_note_agreed(state, join), now_s)
    joins = [join]
    if join.layout is not None and _is_newer(state, join):
        state = _adopt(state, join, now_s)
        joins = list(state.present.values())
    for each in joins:
        if state.stage == STOPPING:
            state, more = _regain(state, each)
            actions += more
        elif state.stage == AGREEING and state.opened >= 0:
            state, more = _bring_up(state, each)
            actions += more
    return after(actions, advance(state, now_s))


def _is_newer(state: State, join: Join) -> bool:
    if join.generation != state.generation:
        return join.generation > state.generation
    # Where a member that is at hand was never in it, no step was committed there.
    has_begun = all(state.present[name].opened >= join.opened for name in state.voters)
    return has_begun and join.opened > state.opened


def _counts(state: State, join: Join, place: int) -> bool:
    """Return whether the agent is a member of what ends here, with what it holds.

    That is one of the generation that has begun last, where those after it ended before.
    """
    if _was_to_be_told(state, join):
        return state.members.place_of(join.node, join.start) == place
    if join.layout is None or join.index < 0:
        return False
    if join.layout.shards_of(join.index) != state.members.shards_of(place):
        return False
    if join.generation == state.generation:
        return join.layout == state.members
    return state.opened <= join.generation < state.generation


def _was_to_be_told(state: State, join: Join) -> bool:
    """Return whether the agent has agreed to what ends here, and does not know that it began."""
    return join.agreed == state.members and join.generation < state.generation


def _adopt(state: State, join: Join, now_s: float) -> State:
    """Learn from a member of a newer generation that there is one.

    The coordinator was a standby, or the one before it was lost while it opened that generation.
    """
    assert join.layout is not None
    layout = join.layout
    fresh = State(options=state.options, since_s=now_s)
    return replace(
        fresh,
        stage=STOPPING,
        generation=join.generation,
        opened=join.opened,
        layout=layout,
        ballot=state.ballot,
        # What was asked in this ballot is asked again, and nothing else.
        accepted=state.accepted if join.generation == state.generation else {},
        nodes=(None,) * len(layout.nodes),
        awaited=frozenset(range(len(layout.nodes))),
        present=state.present,
        known=state.known,
        starts=state.starts,
        recorded_starts=state.recorded_starts,
        gone=state.gone,
        dead=state.gone,
        shares_folder=state.shares_folder,
        first_failure=state.first_failure,
        sizing=state.sizing,
        asked_s=state.asked_s,
    )


def _bring_up(state: State, join: Join) -> Decision:
    """Tell the agent of the newest generation: only who knows of it has a vote in the next one."""
    if join.generation >= state.generation:
        return state, []
    return note_told(state, join.node), [Send(node=join.node, message=learn(state))]


def _regain(state: State, join: Join) -> Decision:
    """Count a member in that has come to this coordinator with what it holds."""
    place = state.members.index_of(join.node)
    state = replace(state, awaited=state.awaited - {place})
    if place < 0:
        return _bring_up(state, join)
    if _was_to_be_told(state, join):
        # Without it no step was committed there.
        state = replace(state, opened=min(state.opened, join.opened))
    if not _counts(state, join, place):
        # It is here, and what a member of its name held is not.
        return _bring_up(replace(state, dead=state.dead | {join.node}), join)
    nodes = list(state.nodes)
    if nodes[place] is None:
        nodes[place] = join.node
    state = replace(state, nodes=tuple(nodes), voters=state.voters | {join.node})
    state = _note_agreed(state, join)
    if join.generation < state.generation:
        return _bring_up(state, join)
    order = Break(generation=state.generation, reason="the coordinator was lost")
    return state, [Send(node=join.node, message=order)]


def _note_agreed(state: State, join: Join) -> State:
    if join.agreed is None or join.node not in state.voters or join.generation != state.generation:
        return state
    return replace(state, accepted={**state.accepted, join.node: (join.ballot, join.agreed)})


def _lose(state: State, event: NodeLost, now_s: float) -> Decision:
    if event.node not in state.present:
        # It was lost before.
        return state, []
    present = {name: join for name, join in state.present.items() if name != event.node}
    ended = {event.node} if event.is_dead else frozenset[str]()
    state = withdraw(state, event.node)
    state = replace(
        state,
        present=present,
        dead=state.dead | ended,
        gone=state.gone | ended,
        voters=state.voters - {event.node},
        leapt=-1,
        sizing=note_left(state.options.policy, state.sizing, event.node, now_s),
    )
    note = Note(event="node_lost", fields={"node": event.node, "is_dead": event.is_dead})
    if event.node not in state.nodes:
        return after([note], advance(state, now_s))
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
        state, actions = stop(state, failed, now_s)
        return after([note, *actions], advance(state, now_s))
    return after([note], advance(state, now_s))


def _note_end(state: State, event: NodeEnded, now_s: float) -> Decision:
    """Count a silent agent as dead, unless it was heard of again since it was asked about.

    Whoever has looked has looked for the newest start that the record names, too.
    """
    if find_doubted(state).get(event.node) != event.starts:
        return state, []
    newest = state.recorded_starts.get(event.node) or state.starts.get(event.node, "")
    state = replace(
        state,
        dead=state.dead | {event.node},
        gone=state.gone | {event.node},
        starts={**state.starts, event.node: newest},
        awaited=state.awaited - {state.members.index_of(event.node)},
    )
    note = Note(event="node_ended", fields={"node": event.node, "reason": event.reason})
    return after([note], advance(state, now_s))


def _take_record(state: State, event: Claimed, now_s: float) -> Decision:
    """Go by the record of the next generation, whoever has written it."""
    if event.generation != state.generation + 1:
        return state, []
    state = replace(state, record=event.layout, is_claiming=False, refusal=event.reason)
    return advance(replace(state, answered_s=now_s) if event.layout is None else state, now_s)


def _note_record(state: State, event: Recorded, now_s: float) -> Decision:
    """End as the run has, which these nodes were silent for the end of; else note how far it is."""
    if state.stage != STOPPING:
        return state, []
    if not event.is_over:
        return _go_by_record(state, event, now_s)
    if event.generation < state.generation:
        return state, []
    return end_run(state, event.status, "the run has ended without this node")


def _go_by_record(state: State, event: Recorded, now_s: float) -> Decision:
    """Learn how far the run is, and whose end other coordinators were told of."""
    gone = {
        name
        for name in event.gone - state.gone - state.present.keys()
        if state.starts.get(name) in (None, event.starts.get(name))
    }
    has_news = state.read_after != event.after or state.recorded_starts != event.starts
    state = replace(
        state,
        recorded=event.generation,
        recorded_starts=event.starts,
        read_after=event.after,
    )
    if not gone:
        return advance(state, now_s) if has_news else (state, [])
    state = replace(
        state,
        dead=state.dead | gone,
        gone=state.gone | gone,
        awaited=state.awaited - {state.members.index_of(name) for name in gone},
        starts={**state.starts, **{name: event.starts.get(name, "") for name in gone}},
    )
    return advance(state, now_s)


# ---- what agents pass on


def _agree(state: State, event: Said, now_s: float) -> Decision:
    assert isinstance(event.message, Agree)
    return agree(state, event.node, event.message, now_s)


def _state_saved(state: State, event: Said, now_s: float) -> Decision:
    assert isinstance(event.message, StateSaved)
    return note_saved(state, event.message)


_SAID: dict[type[Message], Callable[[State, Said, float], Decision]] = {
    Agree: _agree,
    Failed: note_failed,
    Stopped: note_stopped,
    Finished: note_finished,
    StateSaved: _state_saved,
}


# ---- stages


def _tick(state: State, now_s: float) -> Decision:
    waited_s = now_s - state.since_s
    options = state.options
    if state.stage == STOPPING and state.awaited and waited_s >= options.lease_s:
        state = replace(state, awaited=frozenset())
    status = max((each.status for each in state.finished.values()), default=0)
    if state.giving_up is not None and waited_s >= options.last_save_deadline_s:
        reason = f"the state was not saved within {options.last_save_deadline_s:g} s"
        return end_run(state, GAVE_UP_STATUS, reason + say_where(state))
    if state.stage == RUNNING and status and waited_s >= options.stop_deadline_s:
        return end_run(state, status, "some ranks were stopped, and the others did not follow")
    if state.stage in (GATHERING, STOPPING, AGREEING):
        state, actions = advance(state, now_s)
        if state.stage in (GATHERING, STOPPING, AGREEING):
            return after(actions, wait(state, now_s))
        return state, actions
    return look_at_size(state, now_s)

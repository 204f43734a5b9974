"""What the coordinator decides about each event, and about each message of a member. Pure.

**A generation opens when its coordinator decides so, and at no other time**: `opening.advance`
opens it once the ranks at hand have reported, each place has a node, and a majority of the last
generation's members has agreed to the new members. `votes` says which nodes are a majority. One
agent's process runs the coordinator. `succession` says which agent that is. Two coordinators may
run at a time, but no two of them find a majority for one number.

| stage     | what ends the stage                                     | next stage           |
|-----------|---------------------------------------------------------|----------------------|
| gathering | enough nodes have joined, which may begin the run       | agreeing             |
| agreeing  | the nodes that were asked have agreed                   | running              |
| agreeing  | a node that was asked is lost, or has joined anew       | stopping (gathering) |
| running   | the first fault, a lost node, a change of size          | stopping             |
| stopping  | all reports are there, and a majority for the members   | agreeing             |
| any       | the ranks have finished, or the run gives up            | ended                |

A coordinator that follows a lost one begins in stopping. Silence is not death: an agent that
answers nothing, or whose connection has ended without a goodbye, may live on behind a broken
network, or stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from resilience.agent.coordination import events, opening, patience, ranks, side_save, size
from resilience.agent.coordination.counters import say_where
from resilience.agent.coordination.events import Action, Note, Send
from resilience.agent.coordination.founding import RENEWAL_S
from resilience.agent.coordination.membership import Decision, Options, Stage, State, after
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.votes import find_doubted, in_later_ballot
from resilience.comm import messages
from resilience.comm.messages import Join
from resilience.elastic.policy import Sizing, note_came, note_left
from resilience.state.layout import Layout

_MEMBERS_WAIT = "waits for the members of the last generation to join"


def decide(state: State, event: events.Event, now_s: float) -> Decision:
    """Return the next state, with its reason, and the actions.

    Raises ValueError for a message that no agent tells a coordinator.
    """
    if state.stage == Stage.ENDED:
        return state, []
    if not isinstance(event, events.Said):
        return EVENTS[type(event)](state, event, now_s)
    kind = type(event.message)
    if kind not in MESSAGES:
        names = ", ".join(each.__name__ for each in MESSAGES)
        raise ValueError(f"{event.node} told the coordinator {kind.__name__}; allowed: {names}")
    return MESSAGES[kind](state, event.node, event.message, now_s)


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
    # Of what was before it knows nothing.
    state = replace(state, sizing=Sizing(changed_s=now_s), shares_folder=standing.shares_folder)
    return _await_members(state, layout, standing, lost=lost)


def _await_members(state: State, layout: Layout, last: Join | Standing, *, lost: str = "") -> State:
    """Return the state in which the members of an agent's last generation are waited for."""
    return replace(
        state,
        stage=Stage.STOPPING,
        reason=_MEMBERS_WAIT,
        generation=last.generation,
        opened=last.opened,
        layout=layout,
        nodes=(None,) * len(layout.nodes),
        awaited=frozenset(place for place, node in enumerate(layout.nodes) if node != lost),
    )


def next_deadline_s(state: State, now_s: float) -> float:
    """Return when a tick is due; the coordinator may be woken earlier."""
    options = state.options
    if state.stage == Stage.GATHERING:
        return opening.find_last_call_s(state)
    look_s = size.next_look_s(state, now_s) if state.stage == Stage.RUNNING else float("inf")
    waits = {
        Stage.STOPPING: options.lease_s,
        # Looked after also where nothing happens: the record of the run is renewed then.
        Stage.RUNNING: min(options.last_save_deadline_s, options.stop_deadline_s, RENEWAL_S),
    }
    return min(look_s, state.since_s + waits.get(state.stage, options.join_deadline_s))


# ---- nodes


def _join(state: State, event: events.NodeJoined, now_s: float) -> Decision:
    join = event.join
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
    if state.stage == Stage.RUNNING:
        actions.append(Send(node=join.node, message=opening.learn(state)))
        return after(actions, size.look_at_size(opening.note_told(state, join.node), now_s))
    state = opening.withdraw(state, join.node)
    if is_again:
        # It tells in a later ballot what it has agreed to.
        return opening.advance(_note_agreed(state, join), now_s)
    joins = [join]
    if join.layout is not None and _is_newer(state, join):
        state = _adopt(state, join, now_s)
        joins = list(state.present.values())
    for each in joins:
        if state.stage == Stage.STOPPING:
            state, more = _regain(state, each)
            actions += more
        elif state.stage == Stage.AGREEING and state.opened >= 0:
            state, more = _bring_up(state, each)
            actions += more
    return after(actions, opening.advance(state, now_s))


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
    fresh = State(
        options=state.options,
        since_s=now_s,
        ballot=state.ballot,
        # What was asked in this ballot is asked again, and nothing else.
        accepted=state.accepted if join.generation == state.generation else {},
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
    return _await_members(fresh, join.layout, join)


def _bring_up(state: State, join: Join) -> Decision:
    """Tell the agent of the newest generation: only who knows of it has a vote in the next one."""
    if join.generation >= state.generation:
        return state, []
    return opening.teach(state, join.node)


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
    order = messages.Break(generation=state.generation, reason="the coordinator was lost")
    return state, [Send(node=join.node, message=order)]


def _note_agreed(state: State, join: Join) -> State:
    if join.agreed is None or join.node not in state.voters or join.generation != state.generation:
        return state
    return replace(state, accepted={**state.accepted, join.node: (join.ballot, join.agreed)})


def _lose(state: State, event: events.NodeLost, now_s: float) -> Decision:
    if event.node not in state.present:
        # It was lost before.
        return state, []
    present = {name: join for name, join in state.present.items() if name != event.node}
    ended = {event.node} if event.is_dead else frozenset[str]()
    state = opening.withdraw(state, event.node)
    state = replace(
        state,
        present=present,
        dead=state.dead | ended,
        gone=state.gone | ended,
        voters=state.voters - {event.node},
        leapt=-1,
        sizing=note_left(state.options.policy, state.sizing, event.node, now_s),
    )
    fields = {"node": event.node, "is_dead": event.is_dead}
    actions: list[Action] = [Note(event="node_lost", fields=fields)]
    if event.node not in state.nodes:
        return after(actions, opening.advance(state, now_s))
    lost = state.members.ranks_of(state.nodes.index(event.node))
    nodes = tuple(None if name == event.node else name for name in state.nodes)
    state = replace(
        state,
        nodes=nodes,
        reports={rank: each for rank, each in state.reports.items() if rank not in lost},
        finished={rank: each for rank, each in state.finished.items() if rank not in lost},
    )
    if state.stage == Stage.RUNNING:
        failed = messages.Failed(
            generation=state.generation,
            rank=lost[0],
            reason="node lost",
            text=f"{event.node} with ranks {lost[0]} to {lost[-1]} is gone",
        )
        state, more = ranks.stop(state, failed, now_s)
        actions += more
    return after(actions, opening.advance(state, now_s))


def _note_end(state: State, event: events.NodeEnded, now_s: float) -> Decision:
    """Count a silent agent as dead, unless it was heard of again since it was asked about.

    Whoever has looked has looked for the newest start that the record names, too.
    """
    if find_doubted(state).get(event.node) != event.starts:
        return state, []
    newest = state.recorded_starts.get(event.node) or state.starts.get(event.node, "")
    state = _note_gone(state, {event.node: newest})
    note = Note(event="node_ended", fields={"node": event.node, "reason": event.reason})
    return after([note], opening.advance(state, now_s))


def _note_judged(state: State, event: events.Judged, now_s: float) -> Decision:
    """Begin the run under the record of its folder, or say why these agents may not."""
    state = replace(state, founding=event.record, is_claiming=False)
    if event.record is None:
        return opening.refuse(replace(state, answered_s=now_s), event.reason)
    # An agent that has left since may have begun it with others; one that has not joins again.
    promised = [each.promised for each in state.present.values()]
    return opening.advance(in_later_ballot(state, *promised), now_s)


def _take_record(state: State, event: events.Claimed, now_s: float) -> Decision:
    """Go by the record of the next generation, whoever has written it."""
    if event.generation != state.generation + 1:
        return state, []
    state = replace(state, record=event.layout, is_claiming=False, refusal=event.reason)
    return opening.advance(
        replace(state, answered_s=now_s) if event.layout is None else state, now_s
    )


def _note_record(state: State, event: events.Recorded, now_s: float) -> Decision:
    """End as the run has, which these nodes were silent for the end of; else note how far it is."""
    if state.stage != Stage.STOPPING:
        return state, []
    if not event.is_over:
        return _go_by_record(state, event, now_s)
    if event.generation < state.generation:
        return state, []
    return opening.end_run(state, event.status, "the run has ended without this node")


def _go_by_record(state: State, event: events.Recorded, now_s: float) -> Decision:
    """Learn how far the run is, and whose end other coordinators were told of."""
    gone = {
        name
        for name in event.gone - state.gone - state.present.keys()
        if state.starts.get(name) in (None, event.starts.get(name))
    }
    has_news = state.read_after != event.after or state.recorded_starts != event.starts
    state = replace(
        state, recorded=event.generation, recorded_starts=event.starts, read_after=event.after
    )
    if not gone:
        return opening.advance(state, now_s) if has_news else (state, [])
    starts = {name: event.starts.get(name, "") for name in gone}
    return opening.advance(_note_gone(state, starts), now_s)


def _note_gone(state: State, starts: Mapping[str, str]) -> State:
    """Note that these starts of agents have ended for certain."""
    return replace(
        state,
        dead=state.dead | starts.keys(),
        gone=state.gone | starts.keys(),
        awaited=state.awaited - {state.members.index_of(name) for name in starts},
        starts={**state.starts, **starts},
    )


# ---- stages


def _tick(state: State, event: events.Tick, now_s: float) -> Decision:
    waited_s = now_s - state.since_s
    options = state.options
    if state.stage == Stage.STOPPING and state.awaited and waited_s >= options.lease_s:
        state = replace(state, awaited=frozenset())
    status = max((each.status for each in state.finished.values()), default=0)
    if state.giving_up is not None and waited_s >= options.last_save_deadline_s:
        reason = f"the state was not saved within {options.last_save_deadline_s:g} s"
        return opening.end_run(state, messages.GAVE_UP_STATUS, reason + say_where(state))
    if state.stage == Stage.RUNNING and status and waited_s >= options.stop_deadline_s:
        return opening.end_run(
            state, status, "some ranks were stopped, and the others did not follow"
        )
    if state.stage in (Stage.GATHERING, Stage.STOPPING, Stage.AGREEING):
        state, actions = opening.advance(state, now_s)
        if state.stage in (Stage.GATHERING, Stage.STOPPING, Stage.AGREEING):
            return after(actions, patience.await_or_end(state, now_s))
        return state, actions
    return size.look_at_size(state, now_s)


EVENTS: Mapping[type, Callable[[State, Any, float], Decision]] = {
    events.NodeJoined: _join,
    events.NodeLost: _lose,
    events.NodeEnded: _note_end,
    events.Claimed: _take_record,
    events.Judged: _note_judged,
    events.Recorded: _note_record,
    events.Tick: _tick,
}
MESSAGES: Mapping[type[messages.Message], Callable[[State, str, Any, float], Decision]] = {
    messages.Agree: opening.agree,
    messages.Failed: ranks.note_failed,
    messages.Stopped: ranks.note_stopped,
    messages.Finished: ranks.note_finished,
    messages.StateSaved: side_save.note_saved,
}
"""Of a member; a message that came late changes nothing."""

"""Steps of the coordinator towards the next generation: its members, their agreement, its opening.

`coordinator` says who decides that a generation opens. `advance` is the one function that opens it.
Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import replace

from resilience.agent.coordination import events, size, votes
from resilience.agent.coordination.counters import can_save, count, find_end, say_where
from resilience.agent.coordination.events import Action, ClaimRecord, FoundRun, HandOver, Note, Send
from resilience.agent.coordination.founding import SLACK
from resilience.agent.coordination.membership import (
    REPORTS_WAIT,
    Decision,
    Stage,
    State,
    after,
    hold,
)
from resilience.agent.coordination.side_save import begin_save, is_saving
from resilience.comm import messages
from resilience.comm.messages import GAVE_UP_STATUS, NO_BALLOT, Ballot
from resilience.elastic.policy import Growth, note_size
from resilience.state.layout import Layout, make_layout
from resilience.state.report import fresh_report, pack_reports

_ASKED_STATUS = 128 + signal.SIGTERM
_AGREEMENT = "waits until the nodes that were asked agree to the members"
_NODES_WAIT = "waits for nodes in the places of lost ones"
_FOLDER = "waits for an answer of the run's folder"
_PROMISES = "waits until the nodes to be asked have joined in this ballot"
_ASK_AGAIN_S = 1.0
"""After an answer of the folder that was none."""


def advance(state: State, now_s: float) -> Decision:
    """Open the next generation, or take the next step towards it; else say what it waits for."""
    if state.stage == Stage.GATHERING:
        return _found(state, now_s)
    if state.stage == Stage.STOPPING:
        return _choose(state, now_s)
    if state.stage != Stage.AGREEING:
        return state, []
    if state.asked:
        return hold(state, _AGREEMENT)
    assert state.proposal is not None
    voters = _at_hand(state, state.proposal)
    if not size.fits(state, state.proposal) or len(voters) < len(state.proposal.nodes):
        return take_up(state, state.proposal, generation=state.generation + 1, voters=voters)
    has_all = size.has_reports(state, state.proposal.nodes)
    return _open(state, state.proposal, now_s) if has_all else hold(state, REPORTS_WAIT)


def lacks_nodes(state: State) -> bool:
    """Return whether no generation opens before nodes come in the places of lost ones."""
    is_waiting = state.stage == Stage.STOPPING and state.reason == _NODES_WAIT
    may_shrink = state.options.policy.fit(len(state.nodes) - state.nodes.count(None)) > 0
    return is_waiting and not (state.awaited or may_shrink or is_saving(state))


def _choose(state: State, now_s: float) -> Decision:
    """Propose the members of the next generation, where they can be told by now."""
    num_here = len(state.nodes) - state.nodes.count(None)
    if len(state.reports) < num_here * state.members.num_local_ranks:
        return hold(state, REPORTS_WAIT)
    filled = _fill_places(state, now_s)
    is_whole = None not in filled.nodes and len(filled.reports) == state.members.world_size
    if released := _release(state, now_s, is_whole=is_whole):
        return released
    if not is_whole and not size.may_shrink(filled, now_s):
        return hold(state, _NODES_WAIT)
    members = size.choose_members(filled, now_s)
    if not is_whole:
        return _propose(state, _without_lost(filled), members, now_s)
    if heir := size.find_heir(state, members):
        return state, [HandOver(node=heir)]
    return _propose(state, filled, members, now_s)


def _release(state: State, now_s: float, *, is_whole: bool) -> Decision | None:
    """Let the nodes of a run of one size go that were asked to leave; None where none may.

    The others keep their state and wait for a node in each place. Where the last holder of a shard
    is asked to leave and no other node is there yet, the state is saved, and the run ends.
    """
    here = [node for node in state.nodes if node is not None]
    asked = [node for node in here if not state.is_staying(node)]
    if not asked or state.options.policy.is_elastic or not size.may_wait(state):
        return None
    if not size.have_reported(state, here):
        return None
    staying = tuple(node for node in here if node not in asked)
    if staying and votes.find_held(state, staying) >= votes.find_held(state, here):
        if heir := size.find_heir(state, staying):
            return state, [HandOver(node=heir)]
        orders = [
            Send(node=node, message=messages.LetGo()) for node in asked if node not in state.let_go
        ]
        return replace(state, let_go=state.let_go | set(asked)), [*orders]
    if state.side_save is None:
        state, actions = begin_save(state, now_s)
        return (state, actions) if is_saving(state) else after(actions, advance(state, now_s))
    if is_saving(state):
        return state, []
    if is_whole or state.side_save.problem or not can_save(state):
        return None
    reason = f"{', '.join(asked)} asked to leave, and no other node holds the state"
    return end_run(state, _ASKED_STATUS, reason + say_where(state))


def find_last_call_s(state: State) -> float:
    """Return until when a run that could begin waits for more agents."""
    options = state.options
    called_s = max(state.since_s, state.came_s) + options.last_call_s
    return min(called_s, state.since_s + options.join_deadline_s)


def _found(state: State, now_s: float) -> Decision:
    options = state.options
    is_complete = len(state.present) >= options.num_nodes + options.num_standby_nodes
    if len(state.present) < options.num_nodes or not (
        is_complete or now_s >= find_last_call_s(state)
    ):
        return hold(state, "waits for nodes to join")
    members = sorted(state.present)
    if all(join.shares_folder for join in state.present.values()):
        if state.is_claiming or now_s - state.answered_s < _ASK_AGAIN_S:
            return hold(state, _FOLDER)
        if state.founding is None:
            found = FoundRun(agents=tuple(state.present))
            return replace(state, is_claiming=True, reason=_FOLDER), [found]
        founding = state.founding
        generation = max(state.generation, founding.generation)
        state = replace(state, generation=generation, first=generation + 1)
        # Whoever finds the record waits for those that it names, and for nobody who came since.
        members = [name for name in members if name in founding.agents]
        away = sorted(set(founding.agents) - set(members))
        if len(members) < options.num_nodes or len(away) >= options.num_nodes:
            state = replace(state, founding=None, answered_s=now_s)
            return refuse(state, f"its record names {', '.join(away)}")
        if any(state.present[name].promised < state.ballot for name in members):
            return hold(state, _PROMISES)
    elif 2 * len(state.present) <= options.num_nodes + options.num_standby_nodes:
        total = options.num_nodes + options.num_standby_nodes
        return refuse(
            state,
            f"{len(state.present)} of {total} nodes and standby nodes have come, and more than "
            "half have to where they see no common --run-dir: others could begin it as well",
        )
    else:
        # No record holds others back: all that have come are bound by what they agree to.
        state = replace(state, voters=frozenset(members), accepted=_find_agreed(state))
    num_nodes = options.policy.fit(len(members)) or options.num_nodes
    layout = make_layout(
        nodes=members[:num_nodes],
        num_local_ranks=options.num_local_ranks,
        num_shards=options.num_shards,
        is_sharded=options.is_sharded,
        num_stages=options.num_stages,
    )
    layout = votes.find_newest(state) or _with_starts(state, layout)
    ranks = range(layout.world_size)
    reports = {rank: fresh_report(layout, rank, state.generation) for rank in ranks}
    begun = replace(state, layout=layout, nodes=layout.nodes, reports=reports)
    return _ask(state, begun, layout, now_s)


def _find_agreed(state: State) -> dict[str, tuple[Ballot, Layout]]:
    """Return what agents that have just come have agreed to under another coordinator."""
    told = {
        name: (join.ballot, join.agreed)
        for name, join in state.present.items()
        if join.agreed is not None and join.generation == state.generation
    }
    return {**state.accepted, **told}


def refuse(state: State, reason: str) -> Decision:
    """Say why the run does not begin, once for each reason."""
    if reason == state.refusal:
        return hold(state, reason)
    warning = events.warn(f"the run does not begin yet: {reason}")
    return replace(state, refusal=reason, reason=reason), [warning]


def _with_starts(state: State, layout: Layout) -> Layout:
    return replace(layout, starts=tuple(state.present[node].start for node in layout.nodes))


def _at_hand(state: State, layout: Layout) -> set[str]:
    """Return the members that are there; another start of an agent is not the same one."""
    starts = dict(zip(layout.nodes, layout.starts, strict=True))
    return {name for name, join in state.present.items() if starts.get(name) == join.start}


def _fill_places(state: State, now_s: float) -> State:
    """Give the place of a lost node to one that waits; its ranks hold nothing."""
    taken = {*state.nodes}
    standby = [name for name in state.present if name not in taken and state.is_staying(name)]
    # Who has still to join again would be waited for.
    standby.sort(key=lambda name: state.present[name].promised != state.ballot)
    nodes = list(state.nodes)
    is_late = now_s - state.since_s >= state.options.partition_patience_s
    for place in sorted(votes.find_given(state, is_late=is_late)) if standby else ():
        if standby:
            own = state.members.nodes[place]
            if own in standby or state.options.recovers:
                nodes[place] = own if own in standby else standby[0]
                standby.remove(str(nodes[place]))
    fresh = {
        rank: replace(fresh_report(state.members, rank, state.generation), node=node)
        for place, node in enumerate(nodes)
        if node is not None and node != state.nodes[place]
        for rank in state.members.ranks_of(place)
    }
    return replace(state, nodes=tuple(nodes), reports={**state.reports, **fresh})


def _without_lost(state: State) -> State:
    """Count the ranks whose places nobody takes as lost."""
    places = [place for place, node in enumerate(state.nodes) if node is None]
    lost = {
        rank: fresh_report(state.members, rank, state.generation)
        for place in places
        for rank in state.members.ranks_of(place)
    }
    return replace(state, reports={**state.reports, **lost})


def holds_back(state: State) -> bool:
    """Return whether a place is kept for its member although another node could take it."""
    places = [place for place, node in enumerate(state.nodes) if node is None]
    has_others = len(state.present) > len(state.nodes) - len(places)
    return has_others and votes.find_given(state, is_late=False) != {*places}


def _propose(state: State, filled: State, nodes: tuple[str, ...], now_s: float) -> Decision:
    """Ask for the members of the next generation, where this side may go on.

    `filled` has the places that are to be given away; until then their members may come back.
    """
    verdict = votes.find_verdict(state)
    if verdict == votes.WAITS:
        return hold(state, "waits, since other nodes may go on without these")
    if votes.goes_by_evidence(state) and state.generation != state.leapt:
        # Others may have opened some before they ended: their numbers are not given twice.
        generation = max(state.generation, state.recorded) + SLACK
        state, actions = take_up(state, state.members, generation=generation, voters=state.voters)
        return after(actions, advance(replace(state, leapt=generation), now_s))
    layout = votes.find_newest(state) or _with_starts(state, replace(state.members, nodes=nodes))
    # The places of members that may live on.
    pairs = enumerate(zip(state.members.nodes, filled.nodes, strict=True))
    given = frozenset(at for at, (old, new) in pairs if new != old and old not in state.dead)
    promised = {state.present[node].promised for node in nodes}
    asks_for_record = verdict == votes.TIE and state.record is None
    gives_away = verdict == votes.GOES_ON and bool(given) and not state.accepted
    is_behind = asks_for_record and max(promised) > state.ballot
    if is_behind or ((asks_for_record or gives_away) and state.probed != (state.generation, given)):
        # Who is silent by now must not be in the record: nobody could open that generation. And a
        # place is given away by what the others hold now: their word comes behind all else.
        return replace(
            votes.in_later_ballot(state, *promised), probed=(state.generation, given)
        ), []
    if verdict != votes.TIE:
        return _ask(state, filled, layout, now_s)
    if state.record is None:
        if promised != {state.ballot}:
            return hold(state, _PROMISES)
        if state.is_claiming or now_s - state.answered_s < _ASK_AGAIN_S:
            return hold(state, _FOLDER)
        claim = ClaimRecord(generation=state.generation + 1, layout=layout)
        claimed_s = state.claimed_s if state.claimed_s >= state.since_s else now_s
        return replace(state, is_claiming=True, claimed_s=claimed_s), [claim]
    if votes.differs_from_record(state):
        reason = "waits for the other half: the record names other members than were agreed to"
        return hold(state, reason)
    return _ask(state, filled, state.record, now_s)


def _ask(before: State, state: State, layout: Layout, now_s: float) -> Decision:
    """Ask for the members of the next generation; `before` is what stays while this has to wait.

    What an agent has agreed to is known once it has promised to agree to nothing earlier.
    """
    asked = state.voters | (set(layout.nodes) & state.present.keys())
    newest = max((state.present[node].promised for node in asked), default=NO_BALLOT)
    if newest > state.ballot:
        # They hear of it, and join again.
        return hold(votes.in_later_ballot(before, newest), _PROMISES)
    if any(state.present[node].promised != state.ballot for node in asked):
        return hold(before, _PROMISES)
    if not state.accepted and state.counted < state.opened:
        state = replace(count(state, now_s), counted=state.opened)
        if end := find_end(state):
            if end.status != GAVE_UP_STATUS or not can_save(state):
                return end_run(state, end.status, end.reason + say_where(state))
            state = replace(state, giving_up=end.reason)
    proposal = messages.Propose(generation=state.generation + 1, ballot=state.ballot, layout=layout)
    state = replace(
        state,
        stage=Stage.AGREEING,
        reason=_AGREEMENT,
        proposal=layout,
        asked=asked,
        accepted={**state.accepted, **dict.fromkeys(state.voters, (state.ballot, layout))},
    )
    if not asked:
        # Nobody of whom it was asked before is left.
        return advance(state, now_s)
    return state, [Send(node=node, message=proposal) for node in sorted(asked)]


def agree(state: State, node: str, agreement: messages.Agree, now_s: float) -> Decision:
    """Count one agent; when all have agreed the generation has come about."""
    is_current = agreement.generation == state.generation + 1 and agreement.ballot == state.ballot
    if state.stage != Stage.AGREEING or not is_current:
        return state, []
    assert state.proposal is not None
    head = agreement.head if node == state.proposal.nodes[0] else state.head
    return advance(replace(state, asked=state.asked - {node}, head=head), now_s)


def withdraw(state: State, node: str) -> State:
    """Give a proposal up where an agent that was asked is gone, or has come anew."""
    if state.stage != Stage.AGREEING or state.proposal is None:
        return state
    if node not in {*state.voters, *state.proposal.nodes, *state.members.nodes}:
        return state
    if state.opened < 0:
        # Others may be asked for then: in one ballot it is always the same ones.
        state = replace(votes.in_later_ballot(state), stage=Stage.GATHERING, proposal=None)
        return replace(state, layout=None, nodes=(), reports={})
    kept = tuple(name if name in state.voters else None for name in state.nodes)
    places = [place for place, name in enumerate(kept) if name is None]
    given = {rank for place in places for rank in state.members.ranks_of(place)}
    reports = {rank: each for rank, each in state.reports.items() if rank not in given}
    return replace(state, stage=Stage.STOPPING, proposal=None, nodes=kept, reports=reports)


def take_up(state: State, layout: Layout, *, generation: int, voters: Collection[str]) -> Decision:
    """Begin behind a generation that has come about and cannot begin as it is."""
    dead = state.gone | (set(layout.nodes) & state.present.keys() - set(voters))
    if layout == state.layout:
        dead |= state.dead
    state = replace(
        _without_agreement(state),
        stage=Stage.STOPPING,
        generation=generation,
        layout=layout,
        nodes=tuple(name if name in voters else None for name in layout.nodes),
        voters=frozenset(voters),
        dead=dead,
    )
    return teach(state, *state.present)


def _without_agreement(state: State) -> State:
    """Return the state in which nothing is agreed to behind the newest generation, or reported."""
    state = replace(state, accepted={}, proposal=None, is_claiming=False, record=None)
    return replace(state, reports={})


def teach(state: State, *nodes: str) -> Decision:
    """Tell agents the newest generation."""
    news = learn(state)
    return note_told(state, *nodes), [Send(node=node, message=news) for node in nodes]


def note_told(state: State, *nodes: str) -> State:
    """Note that agents know the newest generation: what they have said of another is past."""
    present = dict(state.present)
    for name in nodes:
        present[name] = replace(
            present[name],
            generation=state.generation,
            opened=state.opened,
            layout=state.layout,
            ballot=NO_BALLOT,
            agreed=None,
        )
    return replace(state, present=present)


def learn(state: State) -> messages.Learn:
    """Return what agents are told that the newest generation does not begin with."""
    return messages.Learn(
        generation=state.generation,
        opened=state.opened,
        layout=state.members,
        shares_folder=state.shares_folder,
        known=tuple(sorted(state.known)),
    )


def _open(state: State, layout: Layout, now_s: float) -> Decision:
    generation = state.generation + 1
    num_before = len(state.members.nodes)
    shares_folder = all(state.present[node].shares_folder for node in layout.nodes)
    fields = {"number": generation, "world_size": layout.world_size}
    actions: list[Action] = [Note(event="generation_opened", fields=fields)]
    if state.giving_up is not None:
        actions.append(Note(event="giving_up", fields={"reason": state.giving_up}))
    before = state.members if layout.nodes != state.nodes else None
    opening = messages.Open(
        generation=generation,
        layout=layout,
        head=state.head,
        reports=pack_reports(size.keep_proof(state), before or layout),
        shares_folder=shares_folder,
        is_last=state.giving_up is not None,
        before=before,
        is_passing=size.is_passing(state, layout),
    )
    actions += [Send(node=node, message=opening) for node in layout.nodes]
    state = replace(
        _without_agreement(state),
        stage=Stage.RUNNING,
        since_s=now_s,
        generation=generation,
        opened=generation,
        layout=layout,
        nodes=layout.nodes,
        is_stateless=False,
        side_save=None,
        voters=frozenset(layout.nodes),
        shares_folder=shares_folder,
        finished={},
        dead=state.gone,
        awaited=frozenset(),
        refusal="",
        planned=frozenset(),
        replacing=frozenset(),
        is_leaving=False,
        let_go=frozenset(),
        told_growth=Growth(),
        is_stopping=False,
        reason="",
        sizing=note_size(state.sizing, num_before, len(layout.nodes), now_s),
    )
    news, members = learn(state), {*layout.nodes}
    others = [node for node in state.present if node not in members]
    actions += [Send(node=node, message=news) for node in others]
    return note_told(state, *state.present), actions


def end_run(state: State, status: int, reason: str) -> Decision:
    """End the run for everybody at hand."""
    actions: list[Action] = []
    if state.giving_up is not None and status == GAVE_UP_STATUS:
        reason = f"{state.giving_up}; {reason}"
    if status == GAVE_UP_STATUS:
        actions.append(Note(event="gave_up", fields={"reason": reason}))
    end = messages.End(status=status, reason=reason)
    actions += [Send(node=node, message=end) for node in state.present]
    return replace(state, stage=Stage.ENDED, ending=end), actions

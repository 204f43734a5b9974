"""How often a run may be broken: properties of the policy, over whatever a run may lose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.agent.coordination.counters import count, find_end, note_replaced
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.comm.messages import Failed
from resilience.state.layout import make_layout
from resilience.state.report import Phase, Report, fresh_report

NUM_LOCAL_RANKS = 8
FAULT = Failed(generation=0, rank=3, reason="died", text="rank 3 was killed by SIGKILL")


@dataclass(frozen=True)
class Broken:
    """How a generation ended: at which step, when, and which ranks' processes are gone."""

    step: int
    now_s: float = 0.0
    gone: frozenset[int] = frozenset()


def begin(num_nodes: int, **options: float) -> State:
    layout = make_layout(
        nodes=[f"n{place}" for place in range(num_nodes)], num_local_ranks=NUM_LOCAL_RANKS
    )
    limits = Options(num_nodes=num_nodes, num_local_ranks=NUM_LOCAL_RANKS)
    return State(
        options=replace(limits, **options),  # type: ignore[arg-type]
        stage=Stage.STOPPING,
        generation=0,
        layout=layout,
        nodes=layout.nodes,
        first_failure=FAULT,
    )


def end_generation(state: State, broken: Broken) -> State:
    """Return what is counted once all ranks have reported."""
    members = state.members
    reports = {
        rank: fresh_report(members, rank, 0)
        if rank in broken.gone
        else Report(
            rank=rank,
            node=members.seat(rank).node,
            generation=0,
            phase=Phase.COMPUTING,
            step=broken.step,
            member_generation=0,
        )
        for rank in range(members.world_size)
    }
    return count(replace(state, reports=reports), broken.now_s)


def play(state: State, history: Sequence[Broken]) -> State | None:
    """Return the state behind all of them, None where the run has given up before."""
    for broken in history:
        state = end_generation(state, broken)
        if find_end(state):
            return None
    return state


def node(place: int, ranks: Collection[int] = range(NUM_LOCAL_RANKS)) -> frozenset[int]:
    """Return ranks of a node by their local ranks."""
    return frozenset(place * NUM_LOCAL_RANKS + rank for rank in ranks)


MOST = range(1, NUM_LOCAL_RANKS)
"""Local ranks; without the others nobody could tell how far the run was."""


some_of_a_node = st.sets(st.integers(0, NUM_LOCAL_RANKS - 1), min_size=1)


# ---- the cases that a cluster has every week


def test_nodes_whose_workers_die_together_are_one_incident_each() -> None:
    """16 nodes of 8 workers, 10 incidents allowed for each: the second lost node is no end."""
    history = [Broken(step=place, gone=node(place)) for place in range(16)]

    state = play(begin(16), history)

    assert state is not None
    assert [each.node for each in state.incidents] == [f"n{place}" for place in range(16)]


def test_process_that_makes_room_for_one_with_another_shard_counts_for_nothing() -> None:
    """A standby node that has had another place: its processes end, and the run waits for it."""
    state = end_generation(begin(2), Broken(step=5, gone=node(1)))
    for rank in node(1):
        planned = Failed(generation=0, rank=rank, reason="other shard", text="")
        state = note_replaced(state, planned)

    after = end_generation(state, Broken(step=5, gone=node(1)))

    assert (after.incidents, after.fruitless) == (state.incidents, state.fruitless)


def test_process_that_dies_after_a_planned_end_counts() -> None:
    state = begin(2)
    for reason in ("other shard", "died"):
        state = note_replaced(state, Failed(generation=0, rank=3, reason=reason, text=""))

    after = end_generation(state, Broken(step=5, gone=node(0, [3])))

    assert [each.node for each in after.incidents] == ["n0"]


def test_eleven_node_losses_in_five_hours_are_no_end() -> None:
    history = [Broken(step=40 * n, now_s=1500.0 * n, gone=node(n % 2)) for n in range(11)]

    assert play(begin(2), history) is not None


def test_give_up_says_what_was_counted_and_what_is_allowed() -> None:
    state = begin(2, restarts_max=2)
    for step in range(5):
        assert find_end(state) is None
        state = end_generation(state, Broken(step=step, gone=node(step % 2, [3])))

    end = find_end(state)

    assert end is not None
    assert end.status == 75
    assert end.reason == (
        "5 incidents within 21600 s (n0: 3, n1: 2), allowed are 4 (process_restarts_max 2 for each "
        "of 2 nodes); look for what they have in common, or allow more; the last fault: rank 3: "
        "rank 3 was killed by SIGKILL"
    )


def test_worker_that_dies_before_it_has_a_state_is_an_incident_of_its_node_alone() -> None:
    """The other ranks have none yet, and their processes live."""
    state = begin(2)
    living = [
        replace(fresh_report(state.members, rank, 0), member_generation=0) for rank in range(16)
    ]
    reports = dict(enumerate(living)) | {3: fresh_report(state.members, 3, 0)}

    state = count(replace(state, reports=reports), 0.0)

    assert [each.node for each in state.incidents] == ["n0"]


# ---- properties


@given(lost=some_of_a_node, again=some_of_a_node)
def test_number_of_workers_does_not_matter(lost: set[int], again: set[int]) -> None:
    """Nor whether they die one after the other, before a step is committed."""
    state = play(begin(2), [Broken(step=5, gone=node(1, each)) for each in (lost, again)])

    assert state is not None
    assert [each.node for each in state.incidents] == ["n1"]


@given(num_nodes=st.integers(1, 5), allowed=st.integers(1, 4), data=st.data())
def test_run_ends_exactly_beyond_what_its_nodes_have_together(
    num_nodes: int, allowed: int, data: st.DataObject
) -> None:
    """Whichever nodes they are on."""
    state = begin(num_nodes, restarts_max=allowed)
    places = st.integers(0, num_nodes - 1)
    for step in range(num_nodes * allowed):
        state = end_generation(state, Broken(step=step, gone=node(data.draw(places), MOST)))
        assert find_end(state) is None

    beyond = end_generation(state, Broken(step=90, gone=node(0, MOST)))

    assert find_end(beyond) is not None


@given(steps=st.lists(st.integers(100, 300), max_size=30))
def test_what_was_followed_by_so_many_steps_is_forgiven(steps: list[int]) -> None:
    history = [Broken(step=sum(steps[:n]), gone=node(0, MOST)) for n in range(len(steps))]

    assert play(begin(1, restarts_max=1), history) is not None


@given(gaps=st.lists(st.integers(3_600, 7_200), max_size=30))
def test_what_is_older_than_the_window_is_forgotten(gaps: list[int]) -> None:
    """At most 6 within 6 hours, on a run that may have 6."""
    history = [
        Broken(step=n, now_s=sum(gaps[: n + 1]), gone=node(0, MOST)) for n in range(len(gaps))
    ]

    assert play(begin(1, restarts_max=6), history) is not None


@given(steps=st.lists(st.integers(0, 1000), unique=True, max_size=50))
def test_faults_that_replace_nothing_are_no_incidents(steps: list[int]) -> None:
    """Exceptions, and nodes that were silent and are back with their state."""
    state = play(begin(1, restarts_max=1), [Broken(step=step) for step in sorted(steps)])

    assert state is not None
    assert state.incidents == ()


@given(allowed=st.integers(1, 5), gone=st.one_of(st.just(frozenset[int]()), st.just(node(0))))
def test_what_comes_back_at_once_ends_the_run(allowed: int, gone: frozenset[int]) -> None:
    state = begin(3, restarts_without_progress_max=allowed)
    history = [Broken(step=7, gone=gone)] * (allowed + 1)
    assert play(state, history) is not None

    assert play(state, [*history, history[0]]) is None


@given(allowed=st.integers(1, 4), steps=st.lists(st.integers(8, 1000), min_size=5, max_size=5))
def test_loss_of_all_states_at_once_counts_as_no_step(allowed: int, steps: list[int]) -> None:
    """Nobody can tell how far the ranks were: the count goes on whatever they had committed."""
    state = begin(2, restarts_without_progress_max=allowed)
    everybody, all_but_one = node(0) | node(1), node(0, MOST) | node(1)
    ups = sorted(steps)[: allowed + 1]
    last = Broken(step=7)

    assert play(state, [last, *(Broken(step=step, gone=everybody) for step in ups)]) is None
    assert (
        play(state, [last, *(Broken(step=step, gone=everybody) for step in ups[:-1])]) is not None
    )
    told = [Broken(step=8 + number, gone=all_but_one) for number in range(allowed + 1)]
    assert play(state, [last, *told]) is not None


@given(order=st.permutations([0, 1, 2, 3] * 3))
def test_losses_of_several_nodes_in_one_step_are_no_livelock(order: list[int]) -> None:
    """Each node may fail as often as one that fails alone."""
    state = begin(4, restarts_without_progress_max=3)

    assert play(state, [Broken(step=7, gone=node(place)) for place in order]) is not None


@settings(max_examples=50)
@given(
    history=st.lists(
        st.builds(
            Broken, step=st.integers(0, 5), gone=st.frozensets(st.integers(0, 15), max_size=16)
        ),
        max_size=40,
    )
)
def test_run_that_goes_to_and_fro_ends(history: list[Broken]) -> None:
    """Steps that are committed again and again, after fallbacks, forgive nothing."""
    losses = [each for each in history if each.gone]
    state = play(begin(2, restarts_max=1, restarts_forgiven_after_steps=6), history)

    if state is not None:
        assert len(state.incidents) <= 2
        assert not losses or state.incidents

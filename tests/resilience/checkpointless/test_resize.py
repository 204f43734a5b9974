"""Where the state goes when a generation has other ranks than the one before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.checkpointless.plan import Fallback, RecoveryPlan, plan_recovery
from resilience.checkpointless.resize import plan_resize
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, Report, fresh_report

STEP = 7
ENDED = "ended"
"""The rank has ended the update of the step."""
BEFORE_THE_GATE = (
    Phase.COMPUTING, Phase.REDUCED, Phase.ENTERED, Phase.FRESH, Phase.TORN_REPAIR,
)  # fmt: skip
BEHIND_IT = (Phase.ENTERED, Phase.PASSED, ENDED, Phase.FRESH, Phase.TORN_UPDATE)
LOST = (Phase.FRESH, Phase.TORN_UPDATE, Phase.TORN_REPAIR)


def layout(*nodes: str, num_local_ranks: int = 1, num_shards: int = 1) -> Layout:
    plain = make_layout(nodes=nodes, num_local_ranks=num_local_ranks, num_shards=num_shards)
    return replace(plain, starts=nodes)


def held(where: Layout, rank: int, phase: str = Phase.COMPUTING, **changes: Any) -> Report:
    if phase == ENDED:
        return held(where, rank, Phase.COMPUTING, step=STEP + 1)
    seat, phase = where.seat(rank), Phase(phase)
    report = Report(
        rank=rank,
        node=seat.node,
        generation=3,
        replica=seat.replica,
        shard=seat.shard,
        phase=phase,
        step=STEP,
        step_generation=3,
        gradient_generation=-1 if phase in (Phase.COMPUTING, Phase.TORN_REPAIR) else 3,
        member_generation=3,
    )
    return replace(report, **changes) if phase is not Phase.FRESH else fresh_report(where, rank, 3)


def plan(
    before: Layout, after: Layout, *phases: str, **changes: Sequence[Any]
) -> RecoveryPlan | Fallback:
    """Return the plan for ranks in these phases; `changes` has a value for each."""
    reports = [
        held(before, rank, phase, **{name: values[rank] for name, values in changes.items()})
        for rank, phase in enumerate(phases)
    ]
    return plan_resize(reports, before=before, after=after)


C, E = Phase.COMPUTING, Phase.ENTERED
AB, ABC = layout("a", "b"), layout("a", "b", "c")
ANEW = replace(ABC, starts=("a", "again", "c"))


@pytest.mark.parametrize(
    ("before", "after", "phases", "step", "rolling", "moves"),
    [
        pytest.param(ABC, layout("b", "c"), (Phase.FRESH, C, C), 0, (), [], id="ranks-close-up"),
        pytest.param(AB, ABC, (C, C), 0, (), [(0, 2)], id="a-newcomer-is-repaired"),
        pytest.param(AB, ANEW, (C, C), 0, (), [(0, 1), (0, 2)], id="another-start-holds-nothing"),
        pytest.param(ABC, AB, (E, E, Phase.PASSED), 1, (0, 1), [], id="who-leaves-has-passed"),
        pytest.param(ABC, AB, (E, E, Phase.TORN_UPDATE), 1, (0, 1), [], id="who-leaves-is-torn"),
        pytest.param(ABC, AB, (E, E, ENDED), 1, (0, 1), [], id="who-leaves-has-ended-it"),
    ],
)
def test_what_was_held_goes_on(
    before: Layout,
    after: Layout,
    phases: tuple[str, ...],
    step: int,
    rolling: tuple[int, ...],
    moves: list[tuple[int, int]],
) -> None:
    found = plan(before, after, *phases)

    assert isinstance(found, RecoveryPlan)
    assert (found.step, found.roll_forward) == (STEP + step, rolling)
    assert [(each.source, each.target) for each in found.transfers] == moves
    if phases[-1] == ENDED:
        assert found.reason.endswith("as a rank that has left since holds it")


def test_a_leaving_rank_has_a_voice_about_which_digest_is_right() -> None:
    found = plan(ABC, AB, C, C, C, digest=("odd", "right", "right"))

    assert isinstance(found, RecoveryPlan)
    assert [(each.source, each.target) for each in found.transfers] == [(1, 0)]


def test_shards_of_several_ranks_of_a_node_keep_their_places() -> None:
    before, after, last = (
        layout(*nodes, num_local_ranks=2, num_shards=2) for nodes in ("ab", "bc", "b")
    )

    found = plan(before, after, Phase.FRESH, Phase.FRESH, C, C)
    without = plan(before, last, Phase.FRESH, Phase.FRESH, C, Phase.TORN_UPDATE)

    assert isinstance(found, RecoveryPlan)
    assert [(each.source, each.target) for each in found.transfers] == [(0, 2), (1, 3)]
    assert isinstance(without, Fallback)
    assert without.missing_shards == ("1",)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_two_by_two_ranks_lose_no_step_that_a_rank_on_hand_holds(lost: str) -> None:
    """Every phase of every rank of two nodes with two shards each, one of which leaves."""
    before = layout("a", "b", num_local_ranks=2, num_shards=2)
    after = layout("b" if lost == "a" else "a", num_local_ranks=2, num_shards=2)
    for phases in {*product(BEFORE_THE_GATE, repeat=4), *product(BEHIND_IT, repeat=4)}:
        reports = [held(before, rank, phase) for rank, phase in enumerate(phases)]
        gone = range(2) if lost == "a" else range(2, 4)
        known = [
            fresh_report(before, each.rank, 3) if each.rank in gone else each for each in reports
        ]
        _check(plan_resize(known, before=before, after=after), known, before, after)


@given(data=st.data())
def test_no_committed_step_is_lost_at_any_change_of_size(data: st.DataObject) -> None:
    num_local = data.draw(st.integers(1, 4), "ranks of a node")
    num_shards = data.draw(st.sampled_from([n for n in (1, 2, 4) if num_local % n == 0]), "shards")
    names = [f"n{number}" for number in range(16)]
    old = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=16, unique=True), "old")
    new = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=16, unique=True), "new")
    before = layout(*old, num_local_ranks=num_local, num_shards=num_shards)
    after = layout(*new, num_local_ranks=num_local, num_shards=num_shards)
    phases = data.draw(
        st.lists(
            st.sampled_from(data.draw(st.sampled_from([BEFORE_THE_GATE, BEHIND_IT]), "where")),
            min_size=before.world_size,
            max_size=before.world_size,
        ),
        "phases",
    )
    reports = [held(before, rank, phase) for rank, phase in enumerate(phases)]

    found = plan_resize(reports, before=before, after=after)

    _check(found, reports, before, after)
    if old == new:
        assert found == plan_recovery(reports)


def _check(
    plan: RecoveryPlan | Fallback, reports: Sequence[Report], before: Layout, after: Layout
) -> None:
    """Assert that every rank gets the state that was committed, from one that holds it."""
    holders = {
        after.ranks_of(after.index_of(each.node))[before.seat(each.rank).local_rank]: each
        for each in reports
        if each.phase not in LOST and each.node in after.nodes
    }
    if isinstance(plan, Fallback):
        assert {each.shard for each in holders.values()} != set(after.shards)
        return
    # What a rank has ended, or knows that all can end.
    assert plan.step >= max(each.step + (each.phase is Phase.PASSED) for each in holders.values())
    targets = {each.target for each in plan.transfers}
    assert set(range(after.world_size)) - targets <= set(holders)
    for each in plan.transfers:
        assert each.source in holders
        assert after.seat(each.source).shard == after.seat(each.target).shard

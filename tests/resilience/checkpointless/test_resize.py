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


def test_ranks_close_up_and_keep_what_they_hold() -> None:
    before, after = layout("a", "b", "c"), layout("b", "c")
    reports = [held(before, 0, Phase.FRESH), held(before, 1), held(before, 2)]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert (plan.step, plan.roll_forward, plan.transfers) == (STEP, (), ())


def test_a_newcomer_is_repaired_by_one_that_was_there() -> None:
    before, after = layout("a", "b"), layout("a", "b", "c")

    plan = plan_resize([held(before, rank) for rank in (0, 1)], before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert [(each.source, each.target) for each in plan.transfers] == [(0, 2)]


def test_another_start_of_a_node_holds_nothing() -> None:
    before, after = layout("a", "b"), replace(layout("a", "b", "c"), starts=("a", "again", "c"))

    plan = plan_resize([held(before, rank) for rank in (0, 1)], before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert [each.target for each in plan.transfers] == [1, 2]


def test_a_gate_that_only_a_leaving_rank_has_passed_was_passed() -> None:
    before, after = layout("a", "b", "c"), layout("a", "b")
    reports = [
        held(before, 0, Phase.ENTERED),
        held(before, 1, Phase.ENTERED),
        held(before, 2, Phase.PASSED),
    ]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert (plan.step, plan.roll_forward) == (STEP + 1, (0, 1))


def test_a_tear_of_a_lost_rank_proves_that_the_gate_was_passed() -> None:
    before, after = layout("a", "b", "c"), layout("a", "b")
    reports = [
        held(before, 0, Phase.ENTERED),
        held(before, 1, Phase.ENTERED),
        held(before, 2, Phase.TORN_UPDATE, gradient_generation=3),
    ]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert plan.step == STEP + 1


def test_what_only_a_leaving_rank_holds_is_said_of_it() -> None:
    before, after = layout("a", "b", "c"), layout("a", "b")
    reports = [
        held(before, 0, Phase.ENTERED),
        held(before, 1, Phase.ENTERED),
        held(before, 2, ENDED, step_generation=3),
    ]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert plan.step == STEP + 1
    assert plan.reason.endswith("as a rank that has left since holds it")


def test_a_leaving_rank_has_a_voice_about_which_digest_is_right() -> None:
    before, after = layout("a", "b", "c"), layout("a", "b")
    digests = ("odd", "right", "right")
    reports = [held(before, rank, digest=digest) for rank, digest in enumerate(digests)]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert [(each.source, each.target) for each in plan.transfers] == [(1, 0)]


def test_shards_of_several_ranks_of_a_node_keep_their_places() -> None:
    before = layout("a", "b", num_local_ranks=2, num_shards=2)
    after = layout("b", "c", num_local_ranks=2, num_shards=2)
    reports = [
        held(before, rank, Phase.FRESH if rank < 2 else Phase.COMPUTING) for rank in range(4)
    ]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, RecoveryPlan)
    assert [(each.source, each.target) for each in plan.transfers] == [(0, 2), (1, 3)]


def test_without_a_holder_of_a_shard_that_goes_on_the_tiers_have_to_help() -> None:
    before = layout("a", "b", num_local_ranks=2, num_shards=2)
    after = layout("b", num_local_ranks=2, num_shards=2)
    phases = (Phase.FRESH, Phase.FRESH, Phase.COMPUTING, Phase.TORN_UPDATE)
    reports = [held(before, rank, phase) for rank, phase in enumerate(phases)]

    plan = plan_resize(reports, before=before, after=after)

    assert isinstance(plan, Fallback)
    assert plan.missing_shards == ("1",)


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

    plan = plan_resize(reports, before=before, after=after)

    _check(plan, reports, before, after)
    if old == new:
        assert plan == plan_recovery(reports)


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

"""What holds for every plan: over random worlds, and over all worlds of four ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.checkpointless.plan import Fallback, RecoveryPlan, plan_recovery
from resilience.state.report import Phase, Report

GENERATION = 3
WHOLE = (Phase.COMPUTING, Phase.REDUCED, Phase.ENTERED, Phase.PASSED)
ROLLING = (Phase.ENTERED, Phase.PASSED)
SYMMETRIES = ((0, 1, 2, 3), (2, 3, 0, 1), (1, 0, 3, 2), (3, 2, 1, 0))
State = tuple[Phase, int, int, int, bool, bool]
"""Phase, step, its generation, that of the gradients, is healthy, is member."""


def make_report(
    rank: int, state: State, *, num_shards: int = 2, num_local_ranks: int = 1
) -> Report:
    phase, step, step_generation, gradient_generation, is_healthy, is_member = state
    return Report(
        rank=rank,
        node=f"node-{rank // num_local_ranks}",
        generation=GENERATION,
        replica=rank // num_shards,
        shard=str(rank % num_shards),
        phase=phase,
        step=step,
        step_generation=step_generation,
        gradient_generation=gradient_generation,
        member_generation=GENERATION - (not is_member),
        is_healthy=is_healthy,
    )


@st.composite
def worlds(draw: st.DrawFn) -> list[Report]:
    """Up to 64 ranks; most are whole, near one step, and agree about its generation."""
    num_shards = draw(st.integers(1, 8))
    num_replicas = draw(st.integers(1, 64 // num_shards))
    num_local_ranks = draw(st.sampled_from([1, 2, 4, 8]))
    often = st.sampled_from([True, True, True, True, True, False])
    states = st.tuples(
        st.sampled_from([*Phase, *WHOLE, *ROLLING]),
        st.sampled_from([4, 4, 4, 5]),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([2, 2, 2, 3]),
        often,
        often,
    )
    size = num_shards * num_replicas
    return [
        make_report(rank, state, num_shards=num_shards, num_local_ranks=num_local_ranks)
        for rank, state in enumerate(draw(st.lists(states, min_size=size, max_size=size)))
    ]


def is_holder(report: Report) -> bool:
    is_member = report.member_generation == report.generation
    return report.phase in WHOLE and report.is_healthy and is_member


def find_newest(reports: Sequence[Report]) -> tuple[int, int] | None:
    """Try every step, its generation and that of the step before, from the newest down."""
    holders = [report for report in reports if is_holder(report)]
    steps = {each.step + more for each in holders for more in (0, 1)}
    made = {each.step_generation for each in holders}
    makes = {each.gradient_generation for each in holders}
    for step, generation, base in itertools.product(
        *(sorted(values, reverse=True) for values in (steps, made | makes, made))
    ):
        done = [each for each in holders if (each.step, each.step_generation) == (step, generation)]
        near = [
            each
            for each in holders
            if each.phase in ROLLING
            and (each.step, each.gradient_generation) == (step - 1, generation)
            and each.step_generation == base
        ]
        proved = done or any(each.phase is Phase.PASSED for each in near)
        able = done + (near if proved or is_torn_after(reports, step, generation) else [])
        if {each.shard for each in able} == {each.shard for each in reports}:
            return step, generation
    return None


def is_torn_after(reports: Sequence[Report], step: int, generation: int) -> bool:
    """Did a member fail within this update, while all newest holders have its gradients?"""
    held = [each for each in reports if is_holder(each)]
    newest = [each for each in held if each.step == max(other.step for other in held)]
    torn = [
        each
        for each in reports
        if each.phase is Phase.TORN_UPDATE and each.member_generation == GENERATION
    ]
    return all(
        each.phase in ROLLING and (each.step, each.gradient_generation) == (step - 1, generation)
        for each in newest
    ) and any((each.step, each.gradient_generation) == (step - 1, generation) for each in torn)


def check_plan(reports: Sequence[Report], plan: RecoveryPlan) -> None:
    """Everybody ends at one version, and from memory that counts."""
    targets = [transfer.target for transfer in plan.transfers]
    assert len(targets) == len(set(targets))
    assert not set(targets) & set(plan.roll_forward)
    able = [each for each in reports if each.rank not in targets]
    assert all(is_holder(each) for each in able)
    rolling = [each for each in able if each.rank in plan.roll_forward]
    assert all(each.phase in ROLLING and each.step + 1 == plan.step for each in rolling)
    assert len({each.step_generation for each in rolling}) <= 1
    after = {
        (each.step + 1, each.gradient_generation)
        if each.rank in plan.roll_forward
        else (each.step, each.step_generation)
        for each in able
    }
    assert after == {(plan.step, plan.step_generation)}
    for transfer in plan.transfers:
        source, target = reports[transfer.source], reports[transfer.target]
        assert source in able
        assert source.shard == target.shard
        at_home = [s for s in able if (s.shard, s.node) == (target.shard, target.node)]
        assert transfer.is_same_node == (source.node == target.node) == bool(at_home)


def check(reports: Sequence[Report]) -> None:
    answer = plan_recovery(reports)
    newest = find_newest(reports)
    if isinstance(answer, RecoveryPlan):
        assert (answer.step, answer.step_generation) == newest
        check_plan(reports, answer)
    else:
        assert newest is None
        assert answer.missing_shards
    assert "\n" not in answer.reason


@given(worlds())
def test_random_worlds_get_the_newest_state_that_every_shard_has(reports: list[Report]) -> None:
    check(reports)


@given(worlds(), st.randoms(use_true_random=False))
def test_order_of_reports_does_not_matter(reports: list[Report], random: object) -> None:
    answer = plan_recovery(reports)

    shuffled = list(reports)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_recovery(shuffled) == answer


@given(worlds())
def test_missing_shards_are_those_without_a_holder(reports: list[Report]) -> None:
    """Unless each shard has one, but at steps that do not meet."""
    held = {each.shard for each in reports if is_holder(each)}
    missing = {each.shard for each in reports} - held

    answer = plan_recovery(reports)

    if missing:
        assert isinstance(answer, Fallback)
        assert set(answer.missing_shards) == missing
    elif isinstance(answer, Fallback):
        assert answer.reason.startswith("no step is held for every shard")


@given(worlds())
def test_one_healthy_holder_of_each_shard_at_one_step_is_enough(reports: list[Report]) -> None:
    """The rule that counts at night: holders that agree never meet a fallback."""
    same = [dataclasses.replace(each, step=4, step_generation=1) for each in reports]
    held = {each.shard for each in same if is_holder(each)}

    is_fallback = isinstance(plan_recovery(same), Fallback)

    assert is_fallback == (held != {each.shard for each in same})


@given(worlds())
def test_sources_on_equal_footing_send_equally_often(reports: list[Report]) -> None:
    apart = [dataclasses.replace(each, node=f"node-{each.rank}") for each in reports]
    answer = plan_recovery(apart)
    if isinstance(answer, Fallback):
        return

    targets = {transfer.target for transfer in answer.transfers}
    sent = Counter(transfer.source for transfer in answer.transfers)
    for shard in {each.shard for each in apart}:
        loads = [sent[e.rank] for e in apart if e.shard == shard and e.rank not in targets]
        assert max(loads) - min(loads) <= 1


@given(worlds(), st.data())
def test_minority_of_digests_never_sends(reports: list[Report], data: st.DataObject) -> None:
    votes = st.sampled_from(["x", "x", "x", "x", "x", "y", None])
    digests = data.draw(st.lists(votes, min_size=len(reports), max_size=len(reports)))
    signed = [
        dataclasses.replace(each, digest=digest)
        for each, digest in zip(reports, digests, strict=True)
    ]
    counts = Counter(voice(each) for each in signed if is_holder(each) and each.digest)

    answer = plan_recovery(signed)

    if isinstance(answer, RecoveryPlan):
        targets = {transfer.target for transfer in answer.transfers}
        for each in signed:
            other = {"x": "y", "y": "x"}.get(each.digest or "")
            if (
                other
                and counts[voice(dataclasses.replace(each, digest=other))] >= counts[voice(each)]
            ):
                assert each.rank in targets or not is_holder(each)


def voice(report: Report) -> tuple[str, int, int, str | None]:
    return report.shard, report.step, report.step_generation, report.digest


def all_states(*, health: bool) -> list[State]:
    """Every phase at two steps; update 0 -> 1 was made in generation 2, the next is in 3."""
    return [
        (phase, step, (-1, 2)[step], (2, 3)[step], is_healthy, True)
        for phase in Phase
        for step in (0, 1)
        for is_healthy in ((True, False) if health and phase in WHOLE else (True,))
    ]


def all_worlds(states: Sequence[State]) -> Iterator[list[Report]]:
    """Every world of 2 replicas x 2 shards that no other names of ranks make equal."""
    made = [[make_report(rank, state) for state in states] for rank in range(4)]
    for world in itertools.product(range(len(states)), repeat=4):
        if all(world <= tuple(world[i] for i in order) for order in SYMMETRIES):
            yield [made[rank][index] for rank, index in enumerate(world)]


def test_every_world_of_four_ranks() -> None:
    num_worlds = 0
    for reports in all_worlds(all_states(health=False)):
        check(reports)
        num_worlds += 1

    assert num_worlds == (14**4 + 3 * 14**2) // 4, "one of each that are equal but for names"


@pytest.mark.slow
def test_every_world_of_four_ranks_and_their_health() -> None:
    for reports in all_worlds(all_states(health=True)):
        check(reports)

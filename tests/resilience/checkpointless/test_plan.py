from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from resilience.checkpointless.plan import Fallback, RecoveryPlan, Transfer, plan_recovery
from resilience.state.report import Phase, Report

C, R, E, P = Phase.COMPUTING, Phase.REDUCED, Phase.ENTERED, Phase.PASSED
FRESH, TORN, TORN_COPY = Phase.FRESH, Phase.TORN_UPDATE, Phase.TORN_REPAIR
LOST = (FRESH, TORN, TORN_COPY)
GENERATION = 5


def report(rank: int, phase: Phase, step: int = 7, **changes: Any) -> Report:
    """One rank of 2 shards, two ranks a node; the step before was made in generation 2."""
    values: dict[str, Any] = {
        "node": f"node-{rank // 2}",
        "generation": GENERATION,
        "replica": rank // 2,
        "shard": "ab"[rank % 2],
        "step_generation": 2 if step == 7 else GENERATION,
        "gradient_generation": GENERATION if phase in (R, E, P, TORN) else -1,
        "member_generation": GENERATION,
    }
    return Report(rank=rank, phase=phase, step=step, **{**values, **changes})


def world(*phases: Phase | tuple[Phase, int]) -> list[Report]:
    pairs = [phase if isinstance(phase, tuple) else (phase, 7) for phase in phases]
    return [report(rank, phase, step) for rank, (phase, step) in enumerate(pairs)]


def change(reports: Sequence[Report], changes: dict[int, dict[str, Any]]) -> list[Report]:
    return [dataclasses.replace(each, **changes.get(each.rank, {})) for each in reports]


def send(*pairs: tuple[int, int], is_same_node: bool = False) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(source=source, target=target, is_same_node=is_same_node)
        for source, target in pairs
    )


def planned(reports: Sequence[Report]) -> RecoveryPlan:
    plan = plan_recovery(reports)
    assert isinstance(plan, RecoveryPlan), plan.reason
    return plan


@pytest.mark.parametrize(
    ("reports", "step", "rolling", "transfers", "reason"),
    [
        pytest.param(
            world(C, R, E, E),
            *(7, (), ()),
            "resume at step 7: held by all 4 ranks",
            id="nobody-passed-so-the-step-is-run-again",
        ),
        pytest.param(
            world(FRESH, C, E, R),
            *(7, (), send((2, 0))),
            "resume at step 7: held by ranks 1-3; repaired: rank 0 (no state)",
            id="dead-rank-is-repaired-from-its-shard",
        ),
        pytest.param(
            world(P, E, E, E),
            *(8, (0, 1, 2, 3), ()),
            "resume at step 8: finished alone by all 4 ranks, as rank 0 passed the gate",
            id="one-passed-so-all-roll-forward",
        ),
        pytest.param(
            world((C, 8), E, P, FRESH),
            *(8, (1, 2), send((1, 3))),
            "resume at step 8: held by rank 0; finished alone by ranks 1-2, as its gate was "
            "passed; repaired: rank 3 (no state)",
            id="one-ended-so-the-others-roll-forward",
        ),
        pytest.param(
            world(TORN, E, E, E),
            *(8, (1, 2, 3), send((2, 0))),
            "resume at step 8: finished alone by ranks 1-3, as rank 0 failed after the gate; "
            "repaired: rank 0 (failed within the update)",
            id="tear-shows-that-the-gate-was-passed",
        ),
        pytest.param(
            world(TORN, E, E, R),
            *(7, (), send((2, 0))),
            "resume at step 7: held by ranks 1-3; repaired: rank 0 (failed within the update)",
            id="tear-counts-only-with-all-gradients",
        ),
        pytest.param(
            world((C, 8), (C, 8), R, TORN_COPY),
            *(8, (), send((0, 2), (1, 3))),
            "resume at step 8: held by ranks 0-1; repaired: rank 2 (at step 7), "
            "rank 3 (failed while receiving state)",
            id="who-never-entered-cannot-roll-forward",
        ),
        pytest.param(
            change(world((C, 8), (C, 8), E, E), {2: {"gradient_generation": 4}}),
            *(8, (3,), send((0, 2))),
            "resume at step 8: held by ranks 0-1; finished alone by rank 3, as its gate was "
            "passed; repaired: rank 2 (at step 7)",
            id="old-gradients-do-not-make-the-step",
        ),
        pytest.param(
            change(world(C, C, C, C), {1: {"is_healthy": False}, 2: {"member_generation": 3}}),
            *(7, (), send((3, 1), (0, 2))),
            "resume at step 7: held by ranks 0, 3; repaired: rank 1 (own check found the state "
            "changed), rank 2 (no member of generation 5)",
            id="unhealthy-and-dropped-ranks-count-as-none",
        ),
        pytest.param(
            change(world(C, C, C, C), {0: {"step_generation": 3}, 1: {"step_generation": 3}}),
            *(7, (), send((0, 2), (1, 3))),
            "resume at step 7: held by ranks 0-1; repaired: ranks 2-3 (at step 7 of generation 2); "
            "two histories of step 7: that of generation 3 is kept, that of generation 2 dropped",
            id="newer-of-two-histories",
        ),
        pytest.param(
            change(world(C, C, C, C), {0: {"step_generation": 3}}),
            *(7, (), send((2, 0))),
            "resume at step 7: held by ranks 1-3; repaired: rank 0 (at step 7 of generation 3); "
            "two histories of step 7: that of generation 2 is kept, that of generation 3 dropped; "
            "given up: step 7 of generation 3, held by nobody for shard b",
            id="newer-history-without-all-shards",
        ),
        pytest.param(
            world(P, C, E, C),
            *(7, (), ()),
            "resume at step 7: held by all 4 ranks; "
            "given up: step 8 of generation 5, held by nobody for shard b",
            id="step-that-one-shard-cannot-reach",
        ),
    ],
)
def test_plan(
    reports: list[Report],
    step: int,
    rolling: tuple[int, ...],
    transfers: tuple[Transfer, ...],
    reason: str,
) -> None:
    plan = planned(reports)

    assert plan == RecoveryPlan(
        step=step,
        step_generation=plan.step_generation,
        roll_forward=rolling,
        transfers=transfers,
        reason=reason,
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({0: {"gradient_generation": 4}}, id="over-other-gradients"),
        pytest.param({1: {"gradient_generation": 4}}, id="where-another-has-other-gradients"),
        pytest.param({0: {"member_generation": 4}}, id="of-no-member"),
        pytest.param({0: {"step": 6}}, id="of-another-step"),
    ],
)
def test_tear_says_nothing(changes: dict[int, dict[str, Any]]) -> None:
    plan = planned(change(world(TORN, E, E, E), changes))

    assert (plan.step, plan.roll_forward, plan.transfers) == (7, (), send((2, 0)))


@pytest.mark.parametrize(
    ("reports", "missing", "reason"),
    [
        pytest.param(
            world(FRESH, FRESH, FRESH, FRESH),
            ("a", "b"),
            "no rank holds state: all 4 ranks fresh",
            id="first-start",
        ),
        pytest.param(
            world(FRESH, C, TORN, E),
            ("a",),
            "no healthy holder of shard a: rank 0 (no state), rank 2 (failed within the update)",
            id="shard-lost",
        ),
        pytest.param(
            change(world(TORN_COPY, C, C, FRESH), {1: {"is_healthy": False}}),
            ("b",),
            "no healthy holder of shard b: rank 1 (own check found the state changed), "
            "rank 3 (no state)",
            id="unhealthy-holder-is-none",
        ),
        pytest.param(
            world((C, 7), (C, 9), FRESH, FRESH),
            ("a",),
            "no step is held for every shard: newest are shard a at step 7 of generation 2, "
            "shard b at step 9 of generation 5",
            id="no-common-step",
        ),
        pytest.param(
            [report(rank, phase, shard="") for rank, phase in enumerate([FRESH, TORN])],
            ("",),
            "no healthy holder of the whole state: rank 0 (no state), "
            "rank 1 (failed within the update)",
            id="replicas-without-shards",
        ),
        pytest.param(
            [report(rank, FRESH if rank else TORN, shard=f"{rank:02}") for rank in range(20)],
            tuple(f"{rank:02}" for rank in range(20)),
            "no healthy holder of shard 00, shard 01, shard 02, shard 03, shard 04, shard 05, "
            "shard 06, shard 07 and 12 more: ranks 1-19 (no state), "
            "rank 0 (failed within the update)",
            id="long-lists-are-cut",
        ),
    ],
)
def test_fallback(reports: list[Report], missing: tuple[str, ...], reason: str) -> None:
    assert plan_recovery(reports) == Fallback(reason=reason, missing_shards=missing)


def with_digests(*digests: str | None, phases: Sequence[Phase] = ()) -> list[Report]:
    """Replicas without shards, one a node."""
    return [
        report(rank, phase, shard="", node=f"node-{rank}", digest=digest)
        for rank, (digest, phase) in enumerate(
            itertools.zip_longest(digests, phases, fillvalue=None)
        )
        for phase in [phase or C]
    ]


@pytest.mark.parametrize(
    ("reports", "transfers", "reason"),
    [
        pytest.param(
            with_digests("x", "y", "x"),
            send((0, 1)),
            "resume at step 7: held by ranks 0, 2; repaired: rank 1 (digest y, majority has x)",
            id="minority-is-repaired",
        ),
        pytest.param(
            with_digests("x", "y", "x", phases=[E, P, E]),
            send((0, 1)),
            "resume at step 7: held by ranks 0, 2; repaired: rank 1 (digest y, majority has x)",
            id="minority-is-no-evidence-either",
        ),
        pytest.param(
            with_digests("x", "x", "y", phases=[P, E, E]),
            send((0, 2)),
            "resume at step 8: finished alone by ranks 0-1, as rank 0 passed the gate; "
            "repaired: rank 2 (digest y, majority has x)",
            id="digests-before-the-roll-forward-are-compared",
        ),
        pytest.param(
            with_digests("x", None, "x", None),
            (),
            "resume at step 7: held by all 4 ranks",
            id="no-digest-differs-from-none",
        ),
        pytest.param(
            change(with_digests("x", "y", "z"), {2: {"step": 8, "step_generation": 5}}),
            send((2, 0), (2, 1)),
            "resume at step 8: held by rank 2; repaired: "
            "rank 0 (digest x, no majority), rank 1 (digest y, no majority)",
            id="dispute-about-an-older-step-does-not-matter",
        ),
        pytest.param(
            change(with_digests("x", "y", "y"), {1: {"is_healthy": False}, 2: {"phase": TORN}}),
            send((0, 1), (0, 2)),
            "resume at step 7: held by rank 0; repaired: rank 1 (own check found the state "
            "changed), rank 2 (failed within the update)",
            id="who-holds-nothing-has-no-vote",
        ),
    ],
)
def test_digests(reports: list[Report], transfers: tuple[Transfer, ...], reason: str) -> None:
    plan = planned(reports)

    assert (plan.transfers, plan.reason) == (transfers, reason)


@pytest.mark.parametrize(
    ("digests", "listed"),
    [
        pytest.param("xy", "rank 0 has x at step 7, rank 1 has y at step 7", id="one-against-one"),
        pytest.param(
            "xxyy",
            "rank 0 has x at step 7, rank 1 has x at step 7, "
            "rank 2 has y at step 7, rank 3 has y at step 7",
            id="two-against-two",
        ),
    ],
)
def test_digests_without_a_majority_fall_back(digests: str, listed: str) -> None:
    assert plan_recovery(with_digests(*digests)) == Fallback(
        reason=f"no majority among the digests of the whole state: {listed}",
        missing_shards=("",),
    )


def test_sources_at_home_come_first_and_the_others_share_the_rest() -> None:
    phases = [C, C, FRESH, FRESH, FRESH, C, FRESH]
    nodes = ["n0", "n1", "n2", "n1", "n1", "n2", "n3"]
    reports = [
        report(rank, phase, shard="", node=node)
        for rank, (phase, node) in enumerate(zip(phases, nodes, strict=True))
    ]

    assert planned(reports).transfers == (
        *send((5, 2), (1, 3), (1, 4), is_same_node=True),
        *send((0, 6)),
    )


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        pytest.param("aabb", [(0, 2), (1, 3)], id="sources-of-one-node"),
        pytest.param("abca", [(1, 2), (0, 3)], id="stranger-waits-for-who-is-at-home"),
    ],
)
def test_load_is_shared(nodes: str, pairs: list[tuple[int, int]]) -> None:
    reports = [
        report(rank, phase, shard="", node=node)
        for rank, (phase, node) in enumerate(zip([C, C, FRESH, FRESH], nodes, strict=True))
    ]

    assert [(each.source, each.target) for each in planned(reports).transfers] == pairs


def test_a_lost_node_is_served_by_all_other_nodes() -> None:
    """Each shard has a source on each node; the links of the nodes carry the same load."""
    reports = [
        report(rank, FRESH if rank < 8 else C, shard=f"{rank % 8}", node=f"node-{rank // 8}")
        for rank in range(40)
    ]

    sources = Counter(transfer.source // 8 for transfer in planned(reports).transfers)
    assert sources == {1: 2, 2: 2, 3: 2, 4: 2}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        pytest.param([], "no reports to plan from", id="none"),
        pytest.param(
            [report(0, C), report(2, C)],
            "2 reports are of ranks 0, 2; want one for each from 0",
            id="rank-missing",
        ),
        pytest.param(
            [report(1, C), report(0, C), report(1, C)],
            "3 reports are of ranks 0, 1, 1; want one for each from 0",
            id="rank-twice",
        ),
        pytest.param(
            [report(0, C), report(1, C, generation=6)],
            "reports end different generations: 5, 6; want one",
            id="two-generations",
        ),
    ],
)
def test_reports_that_make_no_whole_are_refused(reports: list[Report], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan_recovery(reports)

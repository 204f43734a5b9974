"""Steps that are not finite, without recovery; and the verdict about them, case by case."""

from __future__ import annotations

import math

import pytest

from recipes_training.data.order import Split
from recipes_training.steps.non_finite import (
    Evidence,
    Outcome,
    describe_samples,
    follows_too_many,
    judge,
    name_ranks,
    read_evidence,
    same_bits,
)
from recipes_training.trainer import StepResult
from tests.recipes_training.jobs import make_job

PROGRAM = "tests.recipes_training.programs:run_spoiled"
FINE = StepResult(loss=1.0, grad_norm=2.0, requests=0)
NAN = StepResult(loss=math.nan, grad_norm=math.nan, requests=0)
INF_LOSS = StepResult(loss=math.inf, grad_norm=2.0, requests=0)


def evidence(*, changed=(), bad=(), odd=(), shards=1, size=4):
    return [
        Evidence(
            has_changed=rank in changed,
            is_finite=rank not in bad,
            shard=str(rank % shards),
            state=f"odd {rank}" if rank in odd else f"state of {rank % shards}",
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("second", "found", "outcome", "ranks", "text"),
    [
        pytest.param(
            NAN, {"bad": [1]}, Outcome.REPEATED, (1,), "twice with the same bits", id="batch"
        ),
        pytest.param(NAN, {}, Outcome.REPEATED, (), "twice with the same bits", id="sum"),
        pytest.param(
            NAN, {"bad": range(4)}, Outcome.REPEATED, (), "twice with the same", id="everywhere"
        ),
        pytest.param(
            FINE, {"changed": [2]}, Outcome.CORRUPT, (2,), "rank 2 computed other bits", id="once"
        ),
        pytest.param(
            NAN, {"changed": [2]}, Outcome.CORRUPT, (2,), "rank 2 computed other", id="and-again"
        ),
        pytest.param(
            NAN, {"odd": [3], "bad": [3]}, Outcome.CORRUPT, (3,), "rank 3 holds a state", id="state"
        ),
        pytest.param(
            NAN,
            {"odd": [3], "changed": [1, 2], "bad": [1, 2, 3]},
            Outcome.CORRUPT,
            (3,),
            "rank 3 holds a state",
            id="state-that-others-compute-with",
        ),
        pytest.param(
            NAN,
            {"odd": [1], "shards": 2},
            Outcome.CORRUPT,
            (1, 3),
            "ranks 1 and 3 hold a state",
            id="tie",
        ),
        pytest.param(FINE, {}, Outcome.GONE, (), "no rank had other bits", id="between-ranks"),
        pytest.param(
            FINE, {"changed": range(4)}, Outcome.GONE, (), "no rank had", id="never-the-same-bits"
        ),
        pytest.param(
            FINE, {"changed": [0], "size": 1}, Outcome.CORRUPT, (0,), "rank 0 computed", id="alone"
        ),
        pytest.param(
            NAN, {"shards": 4}, Outcome.REPEATED, (), "twice with the same bits", id="no-copies"
        ),
    ],
)
def test_verdict(second, found, outcome, ranks, text):
    verdict = judge(NAN, second, evidence(**found))

    assert (verdict.outcome, verdict.ranks) == (outcome, ranks)
    assert text in verdict.text


def test_verdict_names_what_was_not_finite():
    assert judge(NAN, NAN, evidence()).text.startswith("the gradient norm is nan")
    assert judge(INF_LOSS, INF_LOSS, evidence()).text.startswith("the loss is inf")


def test_evidence_comes_back_in_the_order_of_ranks():
    known = evidence(changed=[1], bad=[2], size=11)
    told = {rank: known[rank].to_text() for rank in (10, *range(10))}

    assert read_evidence(told) == known


def test_parts_are_compared_by_their_bits():
    assert same_bits([math.nan, 0.5], [-math.nan, 0.5])
    assert not same_bits([0.0], [-0.0])
    assert not same_bits([math.nan], [math.inf])


def test_samples_are_named_by_their_positions():
    split = Split(global_batch_size=24, micro_batch_size=2, world_size=4)

    assert describe_samples(split, step=2, ranks=[]) == "on all ranks, samples 48 to 71"
    assert describe_samples(split, step=2, ranks=[1, 3]) == (
        "on rank 1, samples 54 to 59, rank 3, samples 66 to 71"
    )
    assert describe_samples(split, step=0, ranks=[0, 1, 2, 3, 3]).endswith("and 1 more ranks")
    assert name_ranks([0]) == "rank 0"
    assert name_ranks(range(7)) == "ranks 0, 1, 2, 3 and 3 more"


def test_steps_in_a_row_are_counted_to_the_one_before():
    assert follows_too_many(range(2, 10), 10)
    assert not follows_too_many([2, *range(4, 11)], 11)
    assert not follows_too_many([], 3)


# ---- runs without recovery


def run(workers, folder, program, *, non_finite="fail", is_success_expected=True, **trainer):
    job = make_job(
        trainer={
            "num_devices": 4,
            "max_steps": 6,
            "non_finite": non_finite,
            "optimizer": {"decay_steps": 6},
            **trainer,
        }
    )
    return workers.run(
        job,
        folder,
        target=PROGRAM,
        is_success_expected=is_success_expected,
        variables={"TEST_SPOIL": program, "TEST_MARKERS": str(folder)},
    )


def steps_but(outcome, step):
    return [each for each in without_times(outcome) if each["step"] != step]


def without_times(outcome):
    times = dict.fromkeys(("duration_s", "data_wait_s", "blocked_s"))
    return [{**each, **times} for each in outcome.steps]


def test_batch_that_is_not_finite_twice_ends_the_run(workers, tmp_path):
    outcome = run(workers, tmp_path, "spoil_batch", is_success_expected=False)

    assert outcome.statuses == [1] * 4
    for rank in range(4):
        assert outcome.log(rank) == (
            "recipes_training: step 3: the gradient norm is nan, twice with the same bits, on rank "
            "2, samples 28 to 29; lower trainer.optimizer.lr, raise "
            "trainer.optimizer.warmup_steps, look for broken data or weights, or leave such steps "
            "out with trainer.non_finite=skip\n"
        )
    assert [each["step"] for each in outcome.steps] == [0, 1, 2]
    (event,) = outcome.named("non_finite")
    assert (event.step, event.fields["outcome"], event.fields["ranks"]) == (3, "failed", [2])


def test_skipped_batch_leaves_the_bits_of_a_run_that_makes_no_update_of_it(workers, tmp_path):
    expected = run(workers, tmp_path / "on-purpose", "leave_out")

    outcome = run(workers, tmp_path / "skip", "spoil_batch", non_finite="skip")

    assert steps_but(outcome, 3) == steps_but(expected, 3)
    assert outcome.steps[3]["loss"] == "NaN"
    assert outcome.weights() == expected.weights()
    (event,) = outcome.named("non_finite")
    assert (event.step, event.fields["outcome"]) == (3, "skipped")
    (line,) = outcome.log().splitlines()
    assert line.endswith("on rank 2, samples 28 to 29; it is skipped")


@pytest.mark.parametrize("spoil", ["spoil_loss_once", "spoil_state"])
def test_silent_corruption_names_the_rank_and_ends_a_run_that_cannot_repair_it(
    workers, tmp_path, spoil
):
    outcome = run(workers, tmp_path, spoil, non_finite="skip", is_success_expected=False)

    assert outcome.statuses == [1] * 4
    words = {
        "spoil_loss_once": "rank 2 computed other bits when the step was run again",
        "spoil_state": "rank 2 holds a state that other holders do not have",
    }
    for rank in range(4):
        assert outcome.log(rank) == (
            f"recipes_training: step 3: the gradient norm is nan; {words[spoil]}; without recovery "
            "nothing is repaired, so the run ends\n"
        )
    (event,) = outcome.named("non_finite")
    assert (event.fields["outcome"], event.fields["ranks"]) == ("corrupt", [2])


def test_run_that_would_skip_every_step_ends(workers, tmp_path):
    outcome = run(
        workers,
        tmp_path,
        "spoil_all_from_then_on",
        non_finite="skip",
        max_steps=20,
        num_devices=1,
        is_success_expected=False,
    )

    assert outcome.statuses == [1]
    last = outcome.log().splitlines()[-1]
    assert "step 11: " in last
    assert "the 8 steps before it were skipped for the same" in last
    assert len(outcome.named("non_finite")) == 9

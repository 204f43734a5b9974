"""Which generation a save is given, and which save is refused."""

from __future__ import annotations

import pytest

from resilience.runtime.records import from_json, read_record, to_json
from resilience.tiered.attempts import (
    BegunRun,
    HeldShard,
    KnownStep,
    KnownSteps,
    check_begun,
    check_kept,
    find_attempt,
    join_known,
    judge_held,
    narrow_known,
    plan_attempt,
)
from resilience.tiered.errors import HeldError, StaleError

RUN = BegunRun(first_generation=1000, step=10)


def torn(step: int, generation: int = 0) -> KnownStep:
    return KnownStep(step=step, generation=generation)


def whole(step: int, generation: int = 0) -> KnownStep:
    return KnownStep(step=step, generation=generation, is_whole=True)


def known(*steps: KnownStep, run: BegunRun | None = None) -> KnownSteps:
    return KnownSteps(run=run, steps=steps)


@pytest.mark.parametrize(
    ("there", "least", "generation"),
    [
        pytest.param(known(), 0, 0, id="nothing-was-ever-saved"),
        pytest.param(known(), 7, 7, id="history-of-its-own"),
        pytest.param(known(whole(10)), 0, 0, id="next-step-of-the-same-history"),
        pytest.param(known(whole(10), torn(20)), 0, 1, id="this-step-is-torn"),
        pytest.param(known(whole(10), torn(20), torn(20, 1)), 0, 2, id="torn-twice"),
        pytest.param(known(whole(10), torn(30)), 0, 1, id="later-step-is-torn"),
        pytest.param(known(torn(15)), 0, 0, id="earlier-step-is-torn"),
        pytest.param(known(whole(10, 4)), 0, 4, id="never-below-what-was-seen"),
        pytest.param(known(torn(20, 4)), 9, 9, id="own-number-is-above-what-is-torn"),
        pytest.param(known(whole(10), run=RUN), 0, 1000, id="run-goes-on"),
        pytest.param(known(torn(20, 1000), run=RUN), 0, 1001, id="torn-within-the-run"),
        pytest.param(known(whole(10), torn(30, 3), run=RUN), 0, 1000, id="torn-before-the-run"),
    ],
)
def test_save_has_a_generation_that_nothing_of_its_step_has(
    there: KnownSteps, least: int, generation: int
) -> None:
    assert plan_attempt(20, there, least=least) == generation


def test_step_older_than_a_whole_one_is_refused_and_go_back_named() -> None:
    words = r"step 20 is older than step 30, which is whole, .* client.go_back\(step=\.\.\.\)"

    with pytest.raises(StaleError, match=words):
        plan_attempt(20, known(whole(10), whole(30)), may_overwrite=True)


def test_step_is_overwritten_only_where_that_was_asked_for() -> None:
    there = known(whole(10), whole(20, 3))

    with pytest.raises(HeldError, match="already exists and overwrite=False: step 20 is whole"):
        plan_attempt(20, there)

    assert plan_attempt(20, there, may_overwrite=True) == 4


def test_nodes_know_together_what_each_knows_alone() -> None:
    """One has heard of the run that goes on from step 10, the other has later steps of before."""
    joined = join_known(
        [known(torn(10), run=RUN), known(whole(10), whole(30, 2)), known(torn(20, 5))]
    )

    assert joined == known(whole(10), torn(20, 5), torn(30, 2), run=RUN)
    assert plan_attempt(20, joined) == 1000


def test_what_a_rank_sends_is_enough_to_plan_with() -> None:
    there = known(whole(1), torn(2, 9), whole(3), torn(20), whole(30), run=RUN)

    sent = narrow_known(there, 20)

    assert sent == known(torn(2, 9), torn(20), whole(30), run=RUN)
    assert read_record(KnownSteps, from_json(to_json(sent)), "steps") == sent


@pytest.mark.parametrize(
    ("there", "is_kept"),
    [
        pytest.param(known(whole(20, 3)), True, id="alone"),
        pytest.param(known(whole(20, 3), whole(30, 3)), False, id="later-one-is-whole"),
        pytest.param(known(whole(20, 3), torn(30, 3)), True, id="later-one-is-not"),
        pytest.param(known(whole(20, 3), torn(20, 4)), False, id="newer-attempt"),
        pytest.param(known(whole(20, 3), torn(11, 1000)), False, id="newer-run"),
    ],
)
def test_step_that_was_overtaken_is_not_called_saved(there: KnownSteps, is_kept: bool) -> None:
    if is_kept:
        check_kept(20, 3, there)
    else:
        with pytest.raises(StaleError, match="step 20 was overtaken while it was saved"):
            check_kept(20, 3, there)


def test_newest_whole_history_of_a_step_is_read() -> None:
    there = known(whole(20, 1), whole(20, 3), torn(20, 4), whole(30, 5))

    assert find_attempt(20, there) == 3
    assert find_attempt(40, there) is None


def test_run_that_has_not_said_where_it_begins_saves_nothing() -> None:
    check_begun(RUN, 20, 1000)
    with pytest.raises(StaleError, match=r"where it begins: call client.go_back\(step=\.\.\.\)"):
        check_begun(None, 20, 0)
    with pytest.raises(StaleError, match="generation 999, and the newest run's begin at 1000"):
        check_begun(RUN, 20, 999)


def test_held_shard_is_a_replicas_only_with_the_same_content() -> None:
    assert judge_held(HeldShard(digest="a"), "a") == "same"
    assert judge_held(HeldShard(is_being_written=True), "a") == "wait"
    assert judge_held(HeldShard(), "a") == "gone"
    with pytest.raises(HeldError, match="held with other content"):
        judge_held(HeldShard(digest="b"), "a")

"""Who may begin a run."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination.founding import SILENCE_S, SLACK, Record, judge

FOUND = Record(run="a", number=3, agents=("n0", "n1", "n2"), generation=7)


def test_first_agents_begin_a_run() -> None:
    assert judge(None, run="a", newcomers=["n1", "n0"], unchanged_s=0.0) == Record(
        run="a", number=0, agents=("n0", "n1"), generation=-1
    )


def test_agents_that_may_live_on_are_waited_for() -> None:
    assert judge(FOUND, run="a", newcomers=["n0", "n1", "n9"], unchanged_s=SILENCE_S - 1) == (
        "n2 may go on with the run"
    )


def test_run_begins_anew_once_all_have_come_or_nobody_has_renewed_its_record() -> None:
    for newcomers, unchanged_s in ((["n0", "n1", "n2"], 0.0), (["n0"], SILENCE_S)):
        begun = judge(FOUND, run="a", newcomers=newcomers, unchanged_s=unchanged_s)

        assert begun == Record(run="a", number=4, agents=tuple(newcomers), generation=7 + SLACK)


def test_newer_attempt_of_the_scheduler_waits_for_nobody() -> None:
    begun = judge(FOUND, run="b", newcomers=["n0"], unchanged_s=0.0)

    assert begun == Record(run="b", number=4, agents=("n0",), generation=7 + SLACK)


def test_run_that_has_ended_is_followed_at_once_by_the_next_number() -> None:
    over = replace(FOUND, is_over=True)

    begun = judge(over, run="a", newcomers=["n9"], unchanged_s=0.0)

    assert begun == Record(run="a", number=4, agents=("n9",), generation=7)

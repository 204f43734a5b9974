"""Who may begin a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilience.agent.coordination.founding import (
    OTHERS_SILENCE_S,
    RENEWAL_S,
    SILENCE_S,
    SLACK,
    Record,
    judge,
    note_agents,
)

FOUND = Record(run="a", number=3, agents=("n0", "n1", "n2"), generation=7)


def test_first_agents_begin_a_run() -> None:
    assert judge(None, run="a", newcomers=["n1", "n0"], unchanged_s=0.0) == Record(
        run="a", number=0, agents=("n0", "n1"), generation=-1
    )


def test_agent_that_has_ended_as_an_earlier_start_may_live_on() -> None:
    left = note_agents(FOUND, ["n0", "n1"], {"n1": "a"}, here=["n0"], gone=["n1"])
    back = note_agents(left, ["n1"], {"n1": "b"}, here=["n1"])

    assert (left.gone, back.gone) == (("n1",), ())
    assert dict(back.starts) == {"n1": "b"}
    assert note_agents(back, ["n2"], {"n2": "c"}, here=["n2"]).gone == ()


def test_who_heard_of_an_earlier_start_leaves_the_newer_one_in_the_record() -> None:
    """A coordinator that stood still for a while knows only the start that has ended."""
    known = note_agents(FOUND, ["n1"], {"n1": "b"}, here=["n1"])
    after = note_agents(known, ["n0", "n1"], {"n0": "x", "n1": "a"}, here=["n0"], gone=["n1"])

    assert dict(after.starts) == {"n0": "x", "n1": "b"}
    assert after.gone == ()


def test_agent_that_has_left_the_run_is_not_waited_for() -> None:
    left = replace(FOUND, gone=("n1", "n2"))

    assert isinstance(judge(left, run="a", newcomers=["n0"], unchanged_s=0.0), Record)
    assert isinstance(judge(FOUND, run="a", newcomers=["n0"], unchanged_s=0.0), str)
    of_another = replace(left, gone=("n0", "n1", "n2"))
    assert isinstance(judge(of_another, run="b", newcomers=["n9"], unchanged_s=0.0), Record)


def test_agents_that_may_live_on_are_waited_for() -> None:
    assert judge(FOUND, run="a", newcomers=["n0", "n1", "n9"], unchanged_s=SILENCE_S - 1) == (
        "n2 may go on with the run"
    )


def test_run_begins_anew_once_all_have_come_or_nobody_has_renewed_its_record() -> None:
    for newcomers, unchanged_s in ((["n0", "n1", "n2"], 0.0), (["n0"], SILENCE_S)):
        begun = judge(FOUND, run="a", newcomers=newcomers, unchanged_s=unchanged_s)

        assert begun == Record(run="a", number=4, agents=tuple(newcomers), generation=7 + SLACK)


def test_newer_attempt_of_the_scheduler_waits_for_nobody() -> None:
    begun = judge(FOUND, run="a", attempt=1, newcomers=["n0"], unchanged_s=0.0)

    assert begun == Record(run="a", attempt=1, number=4, agents=("n0",), generation=7 + SLACK)


@pytest.mark.parametrize("is_over", [False, True])
def test_older_attempt_begins_nothing_any_more(is_over: bool) -> None:
    newer = replace(FOUND, attempt=2, is_over=is_over)

    refused = judge(newer, run="a", attempt=1, newcomers=FOUND.agents, unchanged_s=1e9)

    assert refused == (
        "attempt 1 of the run is refused: its folder has seen attempt 2; allowed: at least 2 "
        "(faultCount of HyperPod's operator, or --rdzv-attempt), or another run folder"
    )


def test_names_say_nothing_of_the_processes_of_another_job_that_had_them() -> None:
    """Pods of a Job that was deleted may live on where the API server does not reach them."""
    newcomers = [*FOUND.agents, "n3"]

    for run, what in (("a", "run 'a'"), ("3", "job 3")):
        found = replace(FOUND, run=run)
        refused = judge(found, run="b", newcomers=newcomers, unchanged_s=OTHERS_SILENCE_S - 1)
        assert refused == f"n0, n1, n2 may go on with {what} in the same folder"


def test_another_job_follows_one_that_has_ended_or_does_not_renew_its_record() -> None:
    silent = judge(FOUND, run="b", newcomers=["n0"], unchanged_s=OTHERS_SILENCE_S)
    over = judge(replace(FOUND, is_over=True), run="b", newcomers=["n0"], unchanged_s=0.0)

    assert silent == Record(run="b", number=4, agents=("n0",), generation=7 + SLACK)
    assert over == Record(run="b", number=4, agents=("n0",), generation=7)
    assert RENEWAL_S < OTHERS_SILENCE_S < SILENCE_S


@pytest.mark.parametrize("ended", [["n0", "n1", "n2"], ["n0", "n1"]])
def test_another_job_follows_one_of_which_no_process_lives(ended: list[str]) -> None:
    found = judge(FOUND, run="b", newcomers=["n0"], unchanged_s=0.0, ended=ended)

    begun = Record(run="b", number=4, agents=("n0",), generation=7 + SLACK)
    refused = "n0, n1, n2 may go on with run 'a' in the same folder"
    assert found == (begun if len(ended) == len(FOUND.agents) else refused)


def test_run_that_has_ended_is_followed_at_once_by_the_next_number() -> None:
    over = replace(FOUND, is_over=True)

    begun = judge(over, run="a", newcomers=["n9"], unchanged_s=0.0)

    assert begun == Record(run="a", number=4, agents=("n9",), generation=7)

"""Which rank is said to hang."""

from __future__ import annotations

import pytest

from resilience.agent.processes.hang import find_hang
from resilience.comm.page import Activity, Slot

NOW_S = 100.0


def slots(*texts: str) -> dict[int, Slot]:
    """Return what ranks show: the step, the activity, its last progress, and its heartbeat."""
    found = {}
    for rank, text in enumerate(texts):
        step, activity, *times = text.split()
        progress_s, beat_s = (*map(float, times), NOW_S)[:2]
        found[rank] = Slot(
            beat_s=beat_s,
            step=int(step),
            activity=Activity[activity],
            micro_batch=0,
            progress_s=progress_s,
        )
    return found


@pytest.mark.parametrize(
    ("shown", "states", "rank", "stopped"),
    [
        pytest.param((), {}, None, (), id="no-rank"),
        pytest.param(("3 GATE 50", "3 FORWARD 91"), {}, None, (), id="one-gets-on"),
        pytest.param(("3 GATE 50", "0 NOWHERE 50"), {}, None, (), id="nowhere"),
        pytest.param(("3 GATE 50", "3 FORWARD 90"), {}, 1, (), id="behind"),
        pytest.param(("4 DATA 50", "3 UPDATE 60"), {}, 1, (), id="earlier-step"),
        pytest.param(("3 GATE 50", "3 GATE 60"), {}, 0, (), id="alike"),
        pytest.param(("3 WAITING 50", "3 WAITING 60"), {}, None, (), id="wait"),
        pytest.param(("3 WAITING 20", "3 RECOVERY 95"), {}, None, (), id="wait-for-one-that-goes"),
        pytest.param(("2 WAITING 95", "3 RECOVERY 90"), {}, 1, (), id="wait-for-one-that-does-not"),
        pytest.param(("3 NOWHERE 95", "3 NOWHERE 95 90"), {1: "T"}, 1, (1,), id="stopped-nowhere"),
        pytest.param(
            ("3 NOWHERE 95", "3 NOWHERE 95 91"), {1: "T"}, None, (), id="stopped-just-now"
        ),
        pytest.param(
            ("3 NOWHERE 95", "3 NOWHERE 95 80"), {1: "R"}, None, (), id="silent-but-running"
        ),
        pytest.param(("0 NOWHERE 0 0",), {0: "T"}, None, (), id="no-heartbeat-ever"),
        pytest.param(
            ("3 FORWARD 50", "3 GATE 60", "3 GATE 60"),
            {0: "S", 1: "T", 2: "t"},
            1,
            (1, 2),
            id="stopped-ones-first",
        ),
    ],
)
def test_rank_that_hangs(
    shown: tuple[str, ...], states: dict[int, str], rank: int | None, stopped: tuple[int, ...]
) -> None:
    hang = find_hang(slots(*shown), states, NOW_S, 10.0)

    assert (hang and hang.rank) == rank
    assert (hang.stopped if hang else ()) == stopped


@pytest.mark.parametrize(
    ("shown", "state", "quiet_s", "text"),
    [
        ("3 FORWARD 88 97.5", "R", 12.0, "no progress for 12.0 s; rank 0 is farthest behind, "),
        ("3 FORWARD 88 97.5", "R", 12.0, "silent for 2.5 s, in forward of step 3"),
        ("3 FORWARD 88 97.5", "T", 12.0, "no progress for 12.0 s; rank 0 is stopped (state T), in"),
        ("3 FORWARD 50 85", "T", 50.0, "no heartbeat for 15.0 s; rank 0 is stopped (state T), in"),
        ("4 NOWHERE 0 80", "T", 20.0, "no heartbeat for 20.0 s; rank 0 is stopped (state T), in "),
        ("4 NOWHERE 0 80", "T", 20.0, "in nowhere of step 4"),
    ],
)
def test_hang_began_with_the_last_progress_of_its_rank_and_is_told(
    shown: str, state: str, quiet_s: float, text: str
) -> None:
    hang = find_hang(slots(shown), {0: state}, NOW_S, 10.0)

    assert hang
    assert hang.quiet_s == quiet_s
    assert text in hang.text


def test_the_slowest_counts() -> None:
    hang = find_hang(slots("3 GATE 60", "3 FORWARD 50"), {}, NOW_S, 10.0)

    assert hang
    assert hang.quiet_s == 50.0

"""Which rank is said to hang."""

from __future__ import annotations

import pytest

from resilience.agent.processes.hang import find_hang
from resilience.comm.page import Activity, Slot

NOW_S = 100.0


def slot(step: int, activity: Activity, progress_s: float, *, beat_s: float = NOW_S) -> Slot:
    return Slot(beat_s=beat_s, step=step, activity=activity, micro_batch=0, progress_s=progress_s)


@pytest.mark.parametrize(
    ("slots", "states", "rank", "stopped"),
    [
        pytest.param({}, {}, None, (), id="no-rank"),
        pytest.param(
            {0: slot(3, Activity.GATE, 50), 1: slot(3, Activity.FORWARD, 91)},
            {},
            None,
            (),
            id="one-gets-on",
        ),
        pytest.param(
            {0: slot(3, Activity.GATE, 50), 1: slot(0, Activity.NOWHERE, 50)},
            {},
            None,
            (),
            id="nowhere",
        ),
        pytest.param(
            {0: slot(3, Activity.GATE, 50), 1: slot(3, Activity.FORWARD, 90)},
            {},
            1,
            (),
            id="behind",
        ),
        pytest.param(
            {0: slot(4, Activity.DATA, 50), 1: slot(3, Activity.UPDATE, 60)},
            {},
            1,
            (),
            id="earlier-step",
        ),
        pytest.param(
            {0: slot(3, Activity.GATE, 50), 1: slot(3, Activity.GATE, 60)}, {}, 0, (), id="alike"
        ),
        pytest.param(
            {0: slot(3, Activity.WAITING, 50), 1: slot(3, Activity.WAITING, 60)},
            {},
            None,
            (),
            id="wait",
        ),
        pytest.param(
            {0: slot(3, Activity.WAITING, 20), 1: slot(3, Activity.RECOVERY, 95)},
            {},
            None,
            (),
            id="wait-for-one-that-gets-on",
        ),
        pytest.param(
            {0: slot(2, Activity.WAITING, 95), 1: slot(3, Activity.RECOVERY, 90)},
            {},
            1,
            (),
            id="wait-for-one-that-does-not",
        ),
        pytest.param(
            {0: slot(3, Activity.NOWHERE, 95), 1: slot(3, Activity.NOWHERE, 95, beat_s=90)},
            {1: "T"},
            1,
            (1,),
            id="stopped-nowhere",
        ),
        pytest.param(
            {0: slot(3, Activity.NOWHERE, 95), 1: slot(3, Activity.NOWHERE, 95, beat_s=91)},
            {1: "T"},
            None,
            (),
            id="stopped-just-now",
        ),
        pytest.param(
            {0: slot(3, Activity.NOWHERE, 95), 1: slot(3, Activity.NOWHERE, 95, beat_s=80)},
            {1: "R"},
            None,
            (),
            id="silent-but-running",
        ),
        pytest.param(
            {0: slot(0, Activity.NOWHERE, 0, beat_s=0)}, {0: "T"}, None, (), id="no-heartbeat-ever"
        ),
        pytest.param(
            {
                0: slot(3, Activity.FORWARD, 50),
                1: slot(3, Activity.GATE, 60),
                2: slot(3, Activity.GATE, 60),
            },
            {0: "S", 1: "T", 2: "t"},
            1,
            (1, 2),
            id="stopped-ones-first",
        ),
    ],
)
def test_rank_that_hangs(
    slots: dict[int, Slot], states: dict[int, str], rank: int | None, stopped: tuple[int, ...]
) -> None:
    hang = find_hang(slots, states, NOW_S, 10.0)

    assert (hang and hang.rank) == rank
    assert (hang.stopped if hang else ()) == stopped


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("R", "is farthest behind, silent for 2.5 s, in forward of step 3"),
        ("T", "is stopped (state T), in forward of step 3"),
    ],
)
def test_text_says_where_and_why(state: str, text: str) -> None:
    hang = find_hang({0: slot(3, Activity.FORWARD, 88, beat_s=97.5)}, {0: state}, NOW_S, 10.0)

    assert hang
    assert hang.text == f"no progress for 12.0 s; rank 0 {text}"


@pytest.mark.parametrize(
    ("slots", "states", "quiet_s"),
    [
        pytest.param({0: slot(3, Activity.GATE, 60), 1: slot(3, Activity.FORWARD, 50)}, {}, 50.0,
                     id="the-slowest-counts"),
        pytest.param({0: slot(3, Activity.FORWARD, 50, beat_s=85)}, {0: "T"}, 50.0,
                     id="stopped-after-its-last-progress"),
        pytest.param({0: slot(3, Activity.NOWHERE, 0, beat_s=80)}, {0: "T"}, 20.0,
                     id="stopped-where-it-shows-no-progress"),
    ],
)  # fmt: skip
def test_hang_began_with_the_last_progress_of_its_rank(
    slots: dict[int, Slot], states: dict[int, str], quiet_s: float
) -> None:
    hang = find_hang(slots, states, NOW_S, 10.0)

    assert hang
    assert hang.quiet_s == quiet_s


def test_text_of_a_stopped_one_says_how_long_it_is_silent() -> None:
    slots = {0: slot(3, Activity.FORWARD, 99), 1: slot(4, Activity.NOWHERE, 99, beat_s=88)}

    hang = find_hang(slots, {1: "T"}, NOW_S, 10.0)

    assert hang
    assert hang.text == (
        "no heartbeat for 12.0 s; rank 1 is stopped (state T), in nowhere of step 4"
    )

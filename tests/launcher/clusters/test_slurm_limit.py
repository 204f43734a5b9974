"""What job.sbatch does of a job that its time limit has ended, beside all others that end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from resilience.events import EventLog
from tests.launcher.clusters.test_slurm import SCONTROL, run_script, script

TIERED = "llama/llama3_tiny_tiered"
ASKED = 143
STORE = {
    **dict.fromkeys(("every_s", "keep", "endpoint", "region", "part_size_mib", "attempts")),
    "url": "folder:/shared/checkpoints",
    "every_n_steps": 10,
    "required": True,
    "waiting_max": 1,
    "deadline_s": 60.0,
    "path_style": False,
}
LIMITED = """\
if [ "$1" = requeue ]; then echo "$2" >>requeued; exit "$REFUSED"; fi
if [ "$1" = -o ]; then
  printf 'JobId=%s JobState=%s Restarts=0 Reason=%s EndTime=%s Nodes=2 \\n' \\
    "$4" "$STATE" "$REASON" "$END"
  exit
fi
"""


def end(
    folder: Path,
    *,
    status: int = ASKED,
    left_s: float = 100,
    state: str = "RUNNING",
    saves: str = "now",
    loads: int | None = None,
    gives_up: bool = False,
    refused: int = 0,
    ends_with: int | None = None,
    **values: object,
) -> tuple[bool, str]:
    """Run the script of a job whose step ends so; returns whether it is queued again, and why."""
    text = script(TIERED, **{"resilience.tiered.store": STORE, **values})
    with EventLog(folder / "saved", node="a", rank=0, generation=1) as log:
        if loads is not None:
            log.write("checkpoint_loaded", step=loads)
        log.write("checkpoint_saved", step=10)
        if gives_up:
            log.write("gave_up", reason="no node took the place of lost b")
    if saves == "before":
        (folder / "saved").rename(folder / "events.jsonl")
    elif saves == "now":
        text = text.replace("step=$!\n", "step=$!; cat saved >>events.jsonl\n")
    done = run_script(
        text,
        folder,
        "a,b",
        scontrol=LIMITED + SCONTROL,
        SRUN_STATUS=str(status),
        STATE=state,
        REASON="None",
        END="Unknown" if left_s < 0 else str(int(time.time() + left_s)),
        REFUSED=str(refused),
    )
    assert done.returncode == (status if ends_with is None else ends_with), done.stderr
    return (folder / "requeued").exists(), done.stderr


def test_job_that_the_limit_ended_is_queued_again(tmp_path: Path) -> None:
    is_queued, said = end(tmp_path)

    assert is_queued
    assert (tmp_path / "requeued").read_text() == "123456\n"
    assert said == "job.sbatch: the time limit ended the job; it is queued again\n"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"status": 1}, id="failed"),
        pytest.param({"status": 0}, id="succeeded"),
        pytest.param({"status": 74}, id="store-lacks-something"),
        pytest.param({"status": 137}, id="killed"),
        pytest.param({"left_s": 3600}, id="asked-to-end-long-before"),
        pytest.param({"left_s": -1}, id="no-limit"),
        pytest.param({"state": "COMPLETING"}, id="cancelled"),
        pytest.param({"cluster.requeue_at_limit": False}, id="switched-off"),
        pytest.param({"cluster.requeue": False}, id="queued-again-for-nothing"),
        pytest.param({"cluster.signal_before_end_s": None}, id="without-a-warning"),
        pytest.param({"resilience.tiered.store": None}, id="memory-alone"),
    ],
)
def test_job_that_ended_otherwise_is_not(tmp_path: Path, how: dict[str, object]) -> None:
    assert end(tmp_path, **how) == (False, "")  # type: ignore[arg-type]


@pytest.mark.parametrize("saves", ["before", "never"])
def test_start_that_saved_nothing_is_the_last(tmp_path: Path, saves: str) -> None:
    is_queued, said = end(tmp_path, saves=saves)

    assert not is_queued
    assert "before it had saved a step, so it is not queued again; raise time_limit" in said


@pytest.mark.parametrize("loads", [10, 11])
@pytest.mark.parametrize("status", [ASKED, 75])
def test_start_that_saved_no_newer_step_than_it_had_is_the_last(
    tmp_path: Path, loads: int, status: int
) -> None:
    """What fails at each start would be queued again for ever."""
    is_queued, said = end(tmp_path, loads=loads, status=status)

    assert not is_queued
    assert "before it had saved a step, so it is not queued again" in said


@pytest.mark.parametrize("status", [137, 75])
def test_run_that_gave_up_is_queued_again_where_it_has_saved_a_step(
    tmp_path: Path, status: int
) -> None:
    """A node that was lost has another status than the run."""
    is_queued, said = end(
        tmp_path, status=status, left_s=3600, loads=9, gives_up=True, ends_with=75
    )

    assert (is_queued, said) == (
        True,
        "job.sbatch: the run gave up with status 75; it is queued again\n",
    )


@pytest.mark.parametrize("recipe", ["llama/llama3_tiny_tiered", "llama/llama3_tiny_elastic"])
def test_run_that_gave_up_has_that_status_where_it_keeps_nothing(
    tmp_path: Path, recipe: str
) -> None:
    text = script(recipe).replace("step=$!\n", "step=$!; cat saved >>events.jsonl\n")
    with EventLog(tmp_path / "saved", node="a", rank=None, generation=1) as log:
        log.write("gave_up", reason="no node took the place of lost b")

    done = run_script(text, tmp_path, "a,b", scontrol=LIMITED + SCONTROL, SRUN_STATUS="137")

    assert done.returncode == 75, done.stderr


def test_memory_alone_keeps_the_state_where_somebody_says_so(tmp_path: Path) -> None:
    how = {"resilience.tiered.store": None, "cluster.requeue_at_limit": True}

    assert end(tmp_path, **how)[0]  # type: ignore[arg-type]


def test_refusal_is_said(tmp_path: Path) -> None:
    assert end(tmp_path, refused=1) == (
        True,
        "job.sbatch: the time limit ended the job, and Slurm does not queue it again\n",
    )


@pytest.mark.parametrize(
    ("recipe", "values", "message"),
    [
        (TIERED, {"cluster.requeue": False}, "needs cluster.requeue true"),
        (TIERED, {"cluster.signal_before_end_s": None}, "needs cluster.signal_before_end_s"),
        ("llama/llama3_tiny_pretrain", {"resilience.tiered": None}, "needs resilience.tiered"),
    ],
)
def test_what_it_needs_is_named(recipe: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=f"cluster.requeue_at_limit true {message}"):
        script(recipe, **{"cluster.requeue_at_limit": True, **values})


@pytest.mark.parametrize(
    ("recipe", "signal_s", "words"),
    [
        pytest.param(TIERED, 120, ["--grace-s=85"], id="memory-alone"),
        pytest.param(TIERED, 60, [], id="no-more-than-anyway"),
        pytest.param(TIERED, None, [], id="no-warning"),
    ],
)
def test_workers_have_the_time_that_slurm_leaves_for_their_last_step(
    recipe: str, signal_s: int | None, words: list[str]
) -> None:
    text = script(recipe, **{"cluster.signal_before_end_s": signal_s})

    assert grace(text) == words


def grace(text: str) -> list[str]:
    return [word for word in text.split() if word.startswith("--grace-s")]


def test_workers_without_a_daemon_have_all_of_that_time() -> None:
    values = {"resilience.tiered": None, "cluster.signal_before_end_s": 120}

    assert grace(script("llama/llama3_tiny_pretrain", **values)) == ["--grace-s=115"]

"""What brings a run on Slurm to another size: which jobs are submitted, and which ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.clusters.running.cluster import RunFolder, read_run_folder
from launcher.clusters.running.slurm import SlurmRuns
from launcher.clusters.running.slurm_size import (
    AddedJob,
    SizePlan,
    check_owner,
    check_size,
    plan_size,
    read_added,
    read_num_nodes,
    with_added,
)
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.standing import JobStatus, Phase
from tests.launcher.clusters.test_slurm import write_program
from tests.launcher.command import launch

NAME = "llama3-tiny-elastic"


def added(job_id: int, state: str = "RUNNING") -> AddedJob:
    return AddedJob(job_id=str(job_id), state=state, node="n4", reason="Resources")


@pytest.mark.parametrize(
    ("jobs", "wanted", "plan"),
    [
        pytest.param([], 3, SizePlan(), id="as-it-is"),
        pytest.param([], 5, SizePlan(num_submitted=2), id="grows"),
        pytest.param([added(18)], 5, SizePlan(num_submitted=1), id="goes-on-growing"),
        pytest.param([added(18), added(19)], 5, SizePlan(), id="has-grown"),
        pytest.param([added(18), added(19)], 4, SizePlan(asked=("19",)), id="shrinks"),
        pytest.param([added(18), added(19, "COMPLETING")], 4, SizePlan(), id="is-shrinking"),
        pytest.param([added(18, "COMPLETING")], 4, SizePlan(num_submitted=1), id="grows-again"),
        pytest.param([added(9), added(10)], 4, SizePlan(asked=("10",)), id="by-numbers"),
        pytest.param([added(18, "PENDING"), added(19)], 4, SizePlan(withdrawn=("18",)),
                     id="who-waits-goes-first"),
        pytest.param([added(18), added(19, "PENDING")], 3,
                     SizePlan(withdrawn=("19",), asked=("18",)), id="all-leave"),
        pytest.param([replace(added(18), is_leaving=True)], 4, SizePlan(num_submitted=1),
                     id="who-leaves-counts-no-more"),
    ],
)  # fmt: skip
def test_plan(jobs: list[AddedJob], wanted: int, plan: SizePlan) -> None:
    assert plan_size(3, jobs, wanted) == plan


STATES = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "CANCELLED", "NODE_FAIL")


@given(
    states=st.lists(st.sampled_from(STATES), max_size=6),
    wanted=st.integers(1, 9),
    num_done=st.integers(0, 9),
)
def test_call_that_was_broken_off_is_gone_on_with(
    states: list[str], wanted: int, num_done: int
) -> None:
    """Whatever part of a plan was done: the next one does the rest, and a third has nothing."""
    jobs = [added(number, state) for number, state in enumerate(states, start=18)]
    plan = plan_size(3, jobs, wanted)
    gone = {*plan.withdrawn, *plan.asked[:num_done]}
    come = [added(40 + number, "PENDING") for number in range(min(num_done, plan.num_submitted))]

    left = [each for each in jobs if each.job_id not in gone] + come
    rest = plan_size(3, left, wanted)

    assert rest.num_submitted == plan.num_submitted - len(come)
    assert rest.withdrawn == ()
    assert rest.asked == plan.asked[num_done:]
    whole = [each for each in left if each.job_id not in rest.asked]
    whole += [added(60 + number) for number in range(rest.num_submitted)]
    assert plan_size(3, whole, wanted) == SizePlan()
    assert 3 + sum(each.stays for each in whole) == max(3, wanted)


def test_jobs_are_read_as_squeue_prints_them() -> None:
    text = "18|RUNNING|n4|None\n19|PENDING||Resources\n"

    assert read_added(text) == [
        AddedJob(job_id="18", state="RUNNING", node="n4", reason="None"),
        AddedJob(job_id="19", state="PENDING", node="", reason="Resources"),
    ]
    with pytest.raises(OutsideError, match="squeue printed no job but 'slurm_load_jobs error'"):
        read_added("slurm_load_jobs error\n")


RUNNING = JobStatus(phase=Phase.RUNNING, place="n[1-3]")
ENDED = JobStatus(phase=Phase.FAILED, why="exit status 1", place="n[1-3]")


@pytest.mark.parametrize(
    ("said", "jobs", "expected"),
    [
        (RUNNING, [], RUNNING),
        (RUNNING, [added(18), added(19, "PENDING")],
         JobStatus(phase=Phase.RUNNING, place="n[1-3], n4 by job 18, job 19 waits: Resources")),
        (ENDED, [added(18, "COMPLETING")], ENDED),
        (ENDED, [added(18)],
         JobStatus(phase=Phase.RUNNING, place="n[1-3], n4 by job 18",
                   why="job 17 is failed, and nodes that were added to it still run")),
        (ENDED, [added(18, "PENDING")],
         JobStatus(phase=Phase.FAILED, why="exit status 1",
                   place="n[1-3], job 18 waits: Resources")),
    ],
)  # fmt: skip
def test_run_stands_as_all_of_its_jobs_do(
    said: JobStatus, jobs: list[AddedJob], expected: JobStatus
) -> None:
    assert with_added(said, "17", jobs) == expected


def test_a_job_of_another_user_is_not_scaled() -> None:
    text = "JobId=17 JobName=a UserId=ada(1000) GroupId=ada(7) JobState=RUNNING NumNodes=2\n"

    check_owner(text, "17", 1000)
    with pytest.raises(RecipeError, match="job 17 is that of user ada; allowed: ada scales it"):
        check_owner(text, "17", 7)


def shown(state: str, num_nodes: str) -> str:
    return f"JobId=17 JobName={NAME} JobState={state} Reason=None NumNodes={num_nodes} NumCPUs=4\n"


def test_job_that_does_not_run_is_not_scaled() -> None:
    assert read_num_nodes(shown("RUNNING", "3"), "17") == 3
    with pytest.raises(RecipeError, match=r"Slurm's state is PENDING.* jobid=17 numnodes=N"):
        read_num_nodes(shown("PENDING", "1-4"), "17")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of job 17, which Slurm says goes on with the nodes in the file `own`."""
    folder = tmp_path / "run"
    made = launch("recipe=llama/llama3_tiny_elastic", "cluster=slurm", f"run.dir={folder}",
                  folder=tmp_path)  # fmt: skip
    assert made.status == 0, made.err
    (folder / "submitted.json").write_text(json.dumps({"job_id": "17"}))
    programs = tmp_path / "programs"
    programs.mkdir()
    (folder / "own").write_text(shown("RUNNING", "3"))
    (folder / "jobs").touch()
    write_program(programs / "scontrol", "cat own")
    write_program(programs / "squeue", "cat jobs")
    write_program(
        programs / "sbatch",
        '[ ! -e refuses ] || { echo "no more" >&2; exit 1; }\n'
        'id=$((18 + $(wc -l <submitted || echo 0))); echo "$@" >>submitted\n'
        'echo "$id|PENDING||None" >>jobs; echo "$id"; cp -f no refuses 2>/dev/null || true',
    )
    (folder / "submitted").touch()
    write_program(
        programs / "scancel", 'echo "$@" >>ended\nfor id; do sed -i "/^$id|/d" jobs; done'
    )
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return read_run_folder(folder)


def test_run_grows_by_jobs_of_one_node_and_shrinks_by_their_end(run: RunFolder) -> None:
    SlurmRuns().scale(run, 4)
    SlurmRuns().scale(run, 4)

    (words,) = (run.path / "submitted").read_text().splitlines()
    assert words == (
        "--parsable --job-name=llama3-tiny-elastic-17-added --nodes=1 --exclusive "
        "--signal=B:USR1@120 job.sbatch 17"
    )
    assert json.loads((run.path / "size.json").read_text())["nodes"] == 4

    jobs = run.path / "jobs"
    jobs.write_text(jobs.read_text() + "19|RUNNING|n4|None\n")
    SlurmRuns().scale(run, 3)

    assert (run.path / "ended").read_text() == "--quiet 18\n--quiet --batch --signal=USR1 19\n"
    assert SlurmRuns().status(run).place == ""


def test_node_that_was_asked_to_leave_counts_no_more(run: RunFolder) -> None:
    (run.path / "jobs").write_text("18|RUNNING|n4|None\n")
    (run.path / "added").mkdir()
    (run.path / "added" / "18.left").touch()

    SlurmRuns().scale(run, 4)

    assert len((run.path / "submitted").read_text().splitlines()) == 1
    assert not (run.path / "ended").exists()


def test_second_call_does_what_a_first_one_has_left(run: RunFolder) -> None:
    (run.path / "own").write_text(shown("RUNNING", "2"))
    (run.path / "no").touch()
    with pytest.raises(OutsideError, match="no more"):
        SlurmRuns().scale(run, 4)
    assert len((run.path / "submitted").read_text().splitlines()) == 1
    (run.path / "no").unlink()
    (run.path / "refuses").unlink()

    SlurmRuns().scale(run, 4)

    assert len((run.path / "submitted").read_text().splitlines()) == 2


def test_everything_of_the_run_is_cancelled_at_once(run: RunFolder) -> None:
    SlurmRuns().scale(run, 4)

    SlurmRuns().cancel(run)

    assert (run.path / "ended").read_text() == "17 18\n"


def test_what_waits_is_taken_out_of_the_queue_of_a_run_that_has_ended(run: RunFolder) -> None:
    SlurmRuns().scale(run, 4)
    (run.path / "own").write_text(shown("COMPLETED", "3"))

    assert SlurmRuns().clean(run).removed == ("job 18 from the queue",)
    assert (run.path / "ended").read_text() == "18\n"


@pytest.mark.parametrize(
    ("own", "size", "text"),
    [
        ("RUNNING", "5", "nodes='5' is no size of llama3-tiny-elastic; allowed: 1, 2, 3, 4"),
        ("RUNNING", "2", "job 17 has 3 nodes, and keeps them"),
        ("RUNNING", "2", "allowed: 3, 4. With fewer it goes on after scontrol requeue 17"),
        ("PENDING", "3", "job 17 does not run: Slurm's state is PENDING"),
        ("COMPLETED", "3", "llama3-tiny-elastic has ended: succeeded"),
    ],
)
def test_size_that_a_run_cannot_have_is_refused(
    run: RunFolder, tmp_path: Path, own: str, size: str, text: str
) -> None:
    (run.path / "own").write_text(shown(own, "3"))

    ended = launch("scale", "run", f"nodes={size}", folder=tmp_path)

    assert ended.status == 2
    assert text in ended.err
    assert not (run.path / "size.json").exists()
    assert (run.path / "submitted").read_text() == ""
    assert not (run.path / "ended").exists()


def test_nodes_that_stand_by_come_with_the_most_nodes(run: RunFolder, tmp_path: Path) -> None:
    content = json.loads((run.path / "job.json").read_text())
    content["resilience"]["checkpointless"]["standby_nodes"] = 1
    content["resilience"]["elastic"]["nodes_max"] = 3
    (run.path / "job.json").write_text(json.dumps(content))
    found = read_run_folder(run.path)

    sizes = {size: check_size(found, 1, size) for size in (1, 2, 3)}

    assert sizes == {1: 1, 2: 2, 3: 4}

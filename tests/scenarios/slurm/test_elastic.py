"""A run on a real Slurm that goes on with whatever nodes there are."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.clusters.running.memory import find_arenas
from resilience.events import Event, read_events
from resilience.tiered.errors import LostError
from resilience.tiered.status import ask_daemon
from tests.cases import slow
from tests.launcher.command import Ended, last_of_each, launch
from tests.resilience.agent.test_drain import drain
from tests.scenarios.slurm.cluster import wait_until
from tests.scenarios.slurm.jobs import Slurm, processes, slow_steps, stand_in, submit_words
from tests.scenarios.slurm.test_recovery import Watch
from tests.scenarios.slurm.test_run import check_same_bits, losses

RECIPE = "recipe=llama/llama3_tiny_elastic"
WAIT_S = 60.0
RUN_S = 600.0
NUM_STEPS = 180
SLOW = ("resilience/faults=default", slow_steps(150, 0.4))
"""Until then all has come that changes the run."""
TRAINS = (
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=1",
    "data.seq_length=16",
)


def submitted(folder: Path, *words: str) -> tuple[Path, str]:
    """Submit the elastic recipe; returns the run's folder and the number of its job."""
    run_dir, mine = folder / "there", ("cluster.rdzv_host=127.0.0.1", *last_of_each(*words))
    return run_dir, submit_words(folder, run_dir, RECIPE, *mine)


def training(folder: Path, *words: str) -> tuple[Path, str]:
    """Submit the elastic recipe with workers that train, and not with their stand-in."""
    pytest.importorskip("torch", reason="a worker needs torch")
    return submitted(folder, f"cluster.python={sys.executable}", *TRAINS, *words)


def ask(run_dir: Path, *words: str) -> Ended:
    """Type a command on the run."""
    return launch(words[0], "there", *words[1:], folder=run_dir.parent)


def seen(run_dir: Path) -> dict[str, set[str]]:
    """Return which nodes the checkpoint daemon of each node sees, itself among them."""
    token = (run_dir / "run.token").read_text().strip()
    told = []
    for folder in find_arenas(run_dir):
        with suppress(LostError):  # one that is just started
            told.append(ask_daemon(folder, token=token).reply)
    return {reply["node"]: set(reply["nodes"]) for reply in told}


def wait_for_sight(run_dir: Path, *nodes: str) -> None:
    """Wait until the checkpoint daemons of these nodes see each other."""
    expected = {each: set(nodes) for each in nodes}
    wait_until(lambda: seen(run_dir) == expected, "each daemon sees all others", WAIT_S)


def agents(run_dir: Path) -> dict[str, list[str]]:
    """Return what each node's stand-in was started with, in the first start of its job."""
    seen = (json.loads(path.read_text()) for path in run_dir.glob("seen-0-*.json"))
    return {each["node"]: each["words"] for each in seen}


@pytest.fixture
def pair(slurm: Slurm, tmp_path: Path) -> tuple[Path, str]:
    """A run that Slurm gave two nodes, whose agents note how often they are asked to end."""
    return submit_pair(tmp_path)


def submit_pair(folder: Path, *words: str) -> tuple[Path, str]:
    run_dir, job_id = submitted(
        folder, f"cluster.python={stand_in(folder)}", "cluster.exclude='n[3-4]'",
        "+env.STAND_IN=count how often it is asked", "trainer.num_nodes=2", *words,
    )  # fmt: skip
    wait_until(lambda: len(agents(run_dir)) == 2, "both agents", WAIT_S)
    # What comes may have what was excluded when the run began, and has no limit of its own.
    script = run_dir / "job.sbatch"
    lines = script.read_text().splitlines(keepends=True)
    mine = ("#SBATCH --exclude=", "#SBATCH --time=")
    script.write_text("".join(line for line in lines if not line.startswith(mine)))
    return run_dir, job_id


def test_nodes_come_and_leave_by_jobs_of_their_own(slurm: Slurm, pair: tuple[Path, str]) -> None:
    run_dir, job_id = pair

    grown = ask(run_dir, "scale", "nodes=4")
    wait_until(lambda: len(agents(run_dir)) == 4, "two more agents", WAIT_S)
    again = ask(run_dir, "scale", "nodes=4")
    status = ask(run_dir, "status")
    jobs = slurm.ask("squeue", "--noheader", "--sort=i", "--format=%i").split()
    shrunk = ask(run_dir, "scale", "nodes=3")
    wait_until((run_dir / "asked-n4").exists, "one is asked to leave", WAIT_S)
    wait_until(
        lambda: len(slurm.ask("squeue", "--noheader", "--format=%i").split()) == 2,
        "it left",
        WAIT_S,
    )

    assert (grown.status, again.status, shrunk.status) == (0, 0, 0), grown.err + again.err
    assert jobs[0] == job_id
    assert len(jobs) == 3
    said = f"slurm, job {job_id} on n[1-2], n3 by job {jobs[1]}, n4 by job {jobs[2]}\n"
    assert said in status.out
    words = {node: set(each) for node, each in agents(run_dir).items()}
    for node in ("n1", "n3", "n4"):
        same = {f"--rdzv-id={job_id}", "--rdzv-attempt=0", f"--node-name={node}"}
        assert same <= words[node]
        # What comes may leave, and the run's own job ends as a whole.
        assert ("--ends-run" in words[node]) == (node == "n1")
    (endpoints,) = {each for node in words for each in words[node] if "--rdzv-endpoint" in each}
    assert endpoints.count("127.0.0.1:") == 2
    # Twice would end the run.
    assert (run_dir / "asked-n4").read_text() == "1"
    assert not list(run_dir.glob("asked-n[1-3]"))


def check_asked_at_once(run_dir: Path) -> None:
    """Wait until all nodes are asked to end: before agents let one go that was asked alone."""
    files = [run_dir / f"asked-n{number}" for number in (1, 2, 3)]
    wait_until(lambda: all(each.exists() for each in files), "all are asked", 2 * WAIT_S)
    times = [each.stat().st_mtime for each in files]
    assert max(times) - min(times) < 3.0


@pytest.mark.parametrize("how", ["cancel", slow("scancel"), slow("requeue")])
def test_all_of_a_run_is_asked_to_end_at_once(
    slurm: Slurm, pair: tuple[Path, str], how: str
) -> None:
    """Whoever ends its own job, by whatever command; and what waits is taken out of the queue."""
    run_dir, job_id = pair
    assert ask(run_dir, "scale", "nodes=3").status == 0
    wait_until(lambda: len(agents(run_dir)) == 3, "one more agent", WAIT_S)
    slurm.ask("scontrol", "update", "nodename=n4", "state=drain", "reason=test")
    try:
        assert ask(run_dir, "scale", "nodes=4").status == 0
        waiting = ask(run_dir, "status")
        if how == "cancel":
            assert ask(run_dir, "cancel").status == 0
        else:
            slurm.ask(*{"scancel": ("scancel",), "requeue": ("scontrol", "requeue")}[how], job_id)
        check_asked_at_once(run_dir)
        is_own = {job_id} if how == "requeue" else set[str]()
        wait_until(
            lambda: set(slurm.ask("squeue", "--noheader", "--format=%i").split()) == is_own,
            "what was added has ended", WAIT_S,
        )  # fmt: skip
    finally:
        slurm.ask("scontrol", "update", "nodename=n4", "state=resume")

    assert ", n3 by job " in waiting.out
    assert " waits: " in waiting.out


@pytest.mark.slow
def test_all_of_a_run_is_asked_at_once_before_the_time_limit_and_queued_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    run_dir, job_id = submit_pair(
        tmp_path, 'time_limit="00:02:00"', "cluster.signal_before_end_s=90"
    )
    assert ask(run_dir, "scale", "nodes=3").status == 0
    wait_until(lambda: len(agents(run_dir)) == 3, "one more agent", WAIT_S)
    # Without a saved step it would not be queued again.
    event = '{"step":5,"event":"checkpoint_saved"}'
    (run_dir / "events.jsonl").write_text(event + "\n")
    check_asked_at_once(run_dir)
    wait_until(lambda: slurm.field(job_id, "Restarts") == "1", "it is queued again", WAIT_S)

    assert "the time limit ended the job; it is queued again" in "".join(
        path.read_text() for path in run_dir.glob("*.log")
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_run_that_loses_and_gets_nodes_and_is_queued_again_has_the_bits_of_an_undisturbed_one(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Four nodes, three, four by a second job, two in the next start, three by a third job."""
    run_dir, job_id = training(tmp_path, *SLOW)
    watch = Watch(slurm, run_dir)

    def wait_for_size(number: int) -> None:
        watch.wait_for(lambda event: size_of(event) == number, f"{number} nodes")
        watch.wait_for_progress()

    wait_for_size(4)
    for pid in processes(job_id, "n4"):
        os.kill(pid, signal.SIGKILL)
    slurm.ask("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    wait_for_size(3)
    slurm.ask("scontrol", "update", "nodename=n4", "state=resume")
    assert ask(run_dir, "scale", "nodes=4").status == 0
    wait_for_size(4)
    wait_for_sight(run_dir, "n1", "n2", "n3", "n4")
    slurm.ask("scontrol", "requeue", job_id)
    # It takes no update before it has ended and waits.
    resize = ("scontrol", "update", f"jobid={job_id}", "numnodes=2")
    wait_until(lambda: slurm.run(*resize).returncode == 0, "it takes another size", RUN_S)
    wait_for_size(2)
    assert ask(run_dir, "scale", "nodes=3").status == 0
    wait_for_size(3)
    (added,) = {int(each) for each in slurm.ask("squeue", "-h", "-o", "%i").split()} - {int(job_id)}
    wait_until(
        lambda: slurm.field(job_id, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"),
        "the job has ended", RUN_S,
    )  # fmt: skip

    logs = "".join(path.read_text()[-3000:] for path in sorted(run_dir.rglob("*.log")))
    assert slurm.field(job_id, "JobState") == "COMPLETED", logs
    events = read_events(run_dir / "events.jsonl")
    assert [size for each in events if (size := size_of(each))] == [4, 3, 4, 2, 3], logs
    assert slurm.wait_for_end(str(added)) == "COMPLETED", logs
    assert not [each for each in events if each.event == "recovery_fallback"][2:], logs
    loaded = [each.step for each in events if each.event == "checkpoint_loaded"]
    stopped = {each.step for each in events if each.event == "worker_stopped" and each.step}
    assert len(loaded) == 2, logs
    # Of the step that all had come to when the job was queued again.
    assert {(step or 0) - 1 for step in loaded} == stopped, logs
    here = launch(
        RECIPE, *TRAINS, "trainer.num_nodes=2", "cluster=local", "action=run", "run.dir=here",
        folder=tmp_path,
    )  # fmt: skip
    assert here.status == 0, here.err
    assert len(losses(run_dir)) == NUM_STEPS
    check_same_bits(run_dir, tmp_path / "here")
    # A node that was in an earlier start alone still has what it held.
    assert launch("clean", "there", folder=tmp_path).status == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_shrinks_by_the_end_of_a_job_and_stops_once_when_it_is_cancelled(
    slurm: Slurm, tmp_path: Path
) -> None:
    run_dir, job_id = training(tmp_path, "trainer.max_steps=20000", "cluster.exclude=n4")
    watch = Watch(slurm, run_dir)
    watch.wait_for_progress()
    script = run_dir / "job.sbatch"
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "#SBATCH --exclude=" not in line))

    words = ("scale nodes=4 --wait", "scale nodes=3 --wait", "status", "scale nodes=4 --wait")
    first = [ask(run_dir, *each.split()) for each in words]
    (added,) = set(slurm.ask("squeue", "-h", "-o", "%i").split()) - {job_id}
    # Slurm asks the node's workers, too, and they leave that to their agent.
    slurm.ask("scancel", added)
    watch.wait_for(lambda event: bool(size_of(event)) and event.generation == 4, "3 nodes")
    watch.wait_for_progress()
    wait_until(
        lambda: slurm.ask("squeue", "-h", "-o", "%i").split() == [job_id], "it has ended", WAIT_S
    )
    words = ("scale nodes=4 --wait", "cancel", "status", "scale nodes=4")
    last = [ask(run_dir, *each.split()) for each in words]

    assert [each.status for each in (*first, *last)] == [0, 0, 0, 0, 0, 0, 0, 2], (first, last)
    assert "  size      3 nodes\n" in first[2].out
    assert last[2].out.startswith("llama3-tiny-elastic: cancelled: ")
    assert "llama3-tiny-elastic has ended: cancelled" in last[3].err
    events = read_events(run_dir / "events.jsonl")
    assert [size for each in events if (size := size_of(each))] == [3, 4, 3, 4, 3, 4]
    assert not [each for each in events if each.event == "generation_broken"]
    # By their own goodbyes.
    assert [each.fields["is_dead"] for each in events if each.event == "node_lost"] == [True] * 2
    stops = [each for each in events if each.event == "worker_stopped" and each.step]
    assert len(stops) == 4, stops
    (last,) = {each.step for each in stops}
    saved = [each.step for each in events if each.event == "checkpoint_saved"]
    assert saved[-1] == (last or 0) + 1
    assert slurm.ask("squeue", "--noheader") == ""
    assert launch("clean", "there", folder=tmp_path).status == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_node_of_the_runs_own_job_is_drained_and_the_run_ends_as_its_others_do(
    slurm: Slurm, tmp_path: Path
) -> None:
    run_dir, job_id = training(tmp_path, "trainer.num_nodes=3", "cluster.exclude=n4", *SLOW)
    watch = Watch(slurm, run_dir)
    watch.wait_for_progress()

    said = drain("n1", run_dir, f"--token-file={run_dir}/run.token")
    watch.wait_for(lambda event: size_of(event) == 2, "2 nodes")
    watch.wait_for_progress()
    status = ask(run_dir, "status")

    assert said == (0, "n1 is about to leave the run\n")
    assert "  size      2 nodes\n" in status.out
    assert slurm.wait_for_end(job_id) == "COMPLETED"
    events = read_events(run_dir / "events.jsonl")
    assert [size for each in events if (size := size_of(each))] == [3, 2]
    assert not [each for each in events if each.event == "generation_broken"]
    assert len(losses(run_dir)) == NUM_STEPS
    assert ask(run_dir, "status").out.startswith("llama3-tiny-elastic: succeeded")
    assert launch("clean", "there", folder=tmp_path).status == 0


def size_of(event: Event) -> int | None:
    """Return with how many workers a generation begins, None of any other event."""
    return event.fields["world_size"] if event.event == "generation_opened" else None

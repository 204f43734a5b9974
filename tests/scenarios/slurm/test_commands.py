"""The commands on runs, typed on a real Slurm."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from resilience.event_files import event_files
from resilience.tiered.arena_folder import open_arena
from tests.launcher.command import Ended, launch
from tests.processes import command_of, parents
from tests.scenarios.slurm.cluster import wait_until
from tests.scenarios.slurm.jobs import Slurm, stand_in, submit_words
from tests.scenarios.slurm.test_tiered import arenas as arenas_of
from tests.scenarios.slurm.test_tiered import submit as submit_tiered
from tests.scenarios.slurm.test_tiered import wait_for_checkpoints

TINY = "recipe=llama/llama3_tiny_pretrain"


@pytest.fixture
def submitted(slurm: Slurm, tmp_path: Path) -> Path:
    """A run that was submitted from a folder, whose agents go on until they are told."""
    run = tmp_path / "runs/llama3-tiny-pretrain"
    agents = (f"cluster.python={stand_in(tmp_path)}", "+env.STAND_IN=as told")
    submit_words(tmp_path, run, TINY, "resilience/tiered=ram", *agents)
    slurm.wait_until(lambda: len(list(run.glob("seen-*.json"))) == 2, "both agents")
    return run


def ask(run: Path, *words: str) -> Ended:
    return launch(*words, folder=run.parents[1])


def test_run_is_found_looked_at_and_ended(submitted: Path) -> None:
    job_id = json.loads((submitted / "submitted.json").read_text())["job_id"]
    # As its nodes' agents would: the newest step, and what the store has of it.
    for number, event in enumerate(("step", "checkpoint_saved", "step_stored")):
        record = {"time": time.time() + number, "node": "n1", "rank": 0, "generation": 0, "step": 4}
        record |= {"event": event, "fields": {"loss": 2.5, "duration_s": 0.5, "num_bytes": 8}}
        if event == "step_stored":
            record["rank"] = None
        with (submitted / "events.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    status = ask(submitted, "status", submitted.name)
    listed = ask(submitted, "runs")
    logs = ask(submitted, "logs", submitted.name)
    cancelled = ask(submitted, "cancel", submitted.name)
    after = ask(submitted, "status", submitted.name)
    attached = ask(submitted, "attach", submitted.name)

    lines = status.out.splitlines()
    assert lines[0] == "llama3-tiny-pretrain: running"
    assert f"  where     slurm, job {job_id} on n[1-2]" in lines
    assert "  steps     5 of 200, loss 2.5000, 0.5 s a step, 1 min 38 s left" in lines
    assert any(line.startswith("  safe      checkpoint of step 4, in the store: step 4 of 4, ")
               for line in lines)  # fmt: skip
    assert listed.out.split()[:2] == ["llama3-tiny-pretrain", "running"]
    assert "agent of n1 start 0\n" in logs.out
    assert (cancelled.status, cancelled.err) == (0, "")
    assert " has ended after " in cancelled.out
    assert "cancelled: " in after.out.splitlines()[0]
    assert (attached.status, attached.err) == (0, "")
    assert "llama3-tiny-pretrain has ended: cancelled: " in attached.out
    assert f"  where     slurm, job {job_id} on n[1-2]\n" in attached.out
    assert "no end on record" not in attached.out


def test_second_job_in_the_runs_folder_is_named_and_ended_with_it(
    submitted: Path, slurm: Slurm
) -> None:
    first = json.loads((submitted / "submitted.json").read_text())["job_id"]
    second = slurm.ask("sbatch", "--parsable", "--hold", "job.sbatch", folder=submitted).strip()

    both = ask(submitted, "status", submitted.name).out.splitlines()[0]
    slurm.ask("scancel", first)
    slurm.wait_for_end(first)
    alone = ask(submitted, "status", submitted.name).out.splitlines()[0]
    cancelled = ask(submitted, "cancel", submitted.name)

    assert both == (f"llama3-tiny-pretrain: running: job {second} was submitted in the same folder")
    assert alone == (
        f"llama3-tiny-pretrain: queued: JobHeldUser; job {first} has ended, and job {second} was "
        "submitted in the same folder"
    )
    assert (cancelled.status, cancelled.err) == (0, "")
    assert slurm.field(second, "JobState") == "CANCELLED"


def test_clean_names_a_node_that_is_down(submitted: Path, slurm: Slurm) -> None:
    ask(submitted, "cancel", submitted.name)
    slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=no power")
    try:
        cleaned = ask(submitted, "clean", submitted.name)
    finally:
        slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
        # The tests that follow have their jobs on the first nodes.
        states = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T")
        slurm.wait_until(lambda: set(slurm.ask(*states).split()) == {"idle"}, "all nodes are idle")

    assert cleaned.status == 1
    assert cleaned.err == (
        "left: n2 was not reached, and may hold memory of the run: Slurm's state of it is down, "
        "no power; `clean` the run again when the node is back\n"
    )


def test_memory_on_the_nodes_goes_with_clean(submitted: Path, slurm: Slurm) -> None:
    """One node's daemon still has its arena, and one node takes no step any more."""
    arenas = [open_arena(submitted, f"n{number}") for number in (1, 2)]
    refused = ask(submitted, "clean", submitted.name)
    ask(submitted, "cancel", submitted.name)
    try:
        for arena in arenas:
            (arena / "lock").write_bytes(b"memoryd 1")
        with (arenas[0] / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            used = ask(submitted, "clean", submitted.name)

        cleaned = ask(submitted, "clean", submitted.name)
    finally:
        for arena in arenas:
            shutil.rmtree(arena, ignore_errors=True)

    assert refused.status == 2
    assert (used.status, used.out) == (1, f"removed {arenas[1]} on n2\n")
    assert used.err == f"left: {arenas[0]} on n1, which is in use\n"
    assert (cleaned.status, cleaned.out) == (0, f"removed {arenas[0]} on n1\n")
    # Slurm takes a moment to let go of the nodes of a step that has ended.
    wait_until(lambda: slurm.ask("squeue", "--noheader") == "", "an empty queue", 30.0)


def test_script_that_fails_says_why_first(slurm: Slurm, tmp_path: Path) -> None:
    """Before any agent is started: nothing but the script's own output tells of it."""
    run = tmp_path / "runs/llama3-tiny-pretrain"
    slurm.wait_for_end(submit_words(tmp_path, run, TINY, "cluster.modules=[cuda]"))

    status = ask(run, "status", run.name)
    logs = ask(run, "logs", run.name)

    why = "failed: Slurm's state is FAILED, exit status 1"
    assert status.out.startswith(f"llama3-tiny-pretrain: {why}")
    said = "cluster.modules is set and this node has no command module"
    assert [line.partition(": ")[0] for line in logs.out.splitlines() if said in line] == [
        "first error",
        next(run.glob("*.log")).stem,
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("trainer.entry=-m nosuch", f"cluster.python={sys.executable}"),
            ": argument -m: no module 'nosuch' for 'nosuch'; want one that Python finds here",
        ),
        (("cluster.python=STAND_IN", "+env.STAND_IN=die on the second node"), "n2 was killed"),
        (("cluster.python=/no/python",), ": No such file or directory"),
    ],
    ids=["agents-refuse", "agent-killed", "no-python"],
)
def test_agent_that_ends_a_job_is_its_first_error(
    slurm: Slurm, tmp_path: Path, words: tuple[str, ...], error: str
) -> None:
    """Whatever the job ends with: the others, which srun ends, may give it a cancelled run's."""
    mine = [each.replace("=STAND_IN", f"={stand_in(tmp_path)}") for each in words]
    recipe = ("recipe=script/torch_ddp", "trainer.num_nodes=2", f"trainer.folder={tmp_path}")
    run = tmp_path / "runs/here"
    slurm.wait_for_end(submit_words(tmp_path, run, *recipe, *mine))

    status = ask(run, "status", run.name).out.splitlines()[0]
    logs = ask(run, "logs", run.name).out.splitlines()

    assert status.startswith("torch-ddp: failed: ")
    assert error in status
    (first,) = [line for line in logs if line.startswith("first error: ")]
    assert error in first


def test_run_that_waits_is_taken_out_of_the_queue(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "runs/llama3-tiny-pretrain"
    submit_words(tmp_path, run, TINY, "+cluster.extra_options.hold='true'")

    cleaned = launch("clean", "llama3-tiny-pretrain", folder=tmp_path)

    assert cleaned.status == 0, cleaned.err
    assert cleaned.out.startswith("removed job ")
    assert slurm.ask("squeue", "--noheader") == ""
    status = launch("status", "llama3-tiny-pretrain", folder=tmp_path)
    assert status.out.startswith("llama3-tiny-pretrain: cancelled: ")


@pytest.mark.slow
def test_nothing_is_left_of_a_job_of_which_everything_was_killed(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Real agents, workers and daemons: all of them end at once, and nothing is tidied up."""
    run = tmp_path / "run"
    job_id = submit_tiered(run, "trainer.max_steps=5000")
    wait_for_checkpoints(slurm, run, 1)
    folders = arenas_of(run)
    assert sorted(folders) == ["n1", "n2"]

    slurm.ask("scancel", "--signal=KILL", job_id)
    slurm.wait_for_end(job_id)
    assert all(path.is_dir() for path in folders.values())
    cleaned = launch("clean", str(run), folder=tmp_path)

    assert (cleaned.status, cleaned.err) == (0, "")
    assert sorted(cleaned.out.splitlines()) == sorted(
        f"removed {path} on {node}" for node, path in folders.items()
    )
    assert not any(path.exists() for path in folders.values())
    assert [pid for pid in parents() if str(run).encode() in command_of(pid)] == []
    assert slurm.ask("squeue", "--noheader") == ""
    assert event_files(run / "events.jsonl")
    assert list(run.glob("logs/*.log"))

"""What job.sbatch does of a run that goes on with whatever nodes there are."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from resilience.agent.coordination.founding import Record
from tests.launcher.clusters.test_slurm import (
    SCONTROL,
    agent_words,
    options,
    run_script,
    script,
    srun_words,
)
from tests.launcher.clusters.test_slurm_limit import LIMITED

ELASTIC = "llama/llama3_tiny_elastic"
OWN = "17"
# The state of the run's own job, for the jobs that were added to it.
SHOW = """\
if [ "$1" = -o ]; then
  printf 'JobId=%s JobState=%s Restarts=%s EndTime=Unknown Reason=None NumNodes=3 \\n' \\
    "$4" "$STATE" "$RESTARTS"
  exit
fi
"""
# Jobs come to be listed once: what has been cancelled has gone.
PROGRAMS = {
    "squeue": """\
echo "$@" >>asked
if [[ $* == *--steps* ]]; then printf '17.batch\\n17.4\\n17.3\\n'; exit; fi
if [[ $* == *%i:%N* ]]; then printf '%s' "$ADDED_NODES"; exit; fi
if [ -e cancelled ]; then exit; fi
printf '%s' "$ADDED"
""",
    "scancel": 'echo "$@" >>cancelled',
}


def run(
    folder: Path, nodes: str, *words: str, values: Mapping[str, object] | None = None,
    then: str = "", show: str = SHOW, **env: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run the script of the job with that number, or of one that was added to it.

    It does `then` once its step has begun.
    """
    text = script(ELASTIC, **(values or {}))
    ours = {
        "SLURM_JOB_ID": OWN,
        "SLURM_JOB_NAME": "llama3-tiny-elastic",
        "STATE": "RUNNING",
        "RESTARTS": "0",
        "REASON": "None",
        "REFUSED": "0",
        "ADDED": "",
        "ADDED_NODES": "",
        **env,
    }
    return run_script(
        text.replace("step=$!\n", f"step=$!; {then}\n") if then else text,
        folder,
        nodes,
        scontrol=show + SCONTROL,
        more=PROGRAMS,
        words=words,
        **ours,
    )


def put_end(folder: Path, status: int, attempt: int = 0, name: str = OWN) -> None:
    """Have the run's folder say that a start of a run has ended, as its agents do."""
    record = Record(
        run=name,
        attempt=attempt,
        number=attempt,
        agents=("a", "b"),
        generation=3,
        is_over=True,
        status=status,
    )
    (folder / "generations").mkdir(exist_ok=True)
    path = folder / "generations" / f"run-{attempt}-ended-3"
    path.write_text(json.dumps(asdict(record)))


def asked(folder: Path, program: str) -> list[str]:
    """Return what a program was called with."""
    path = folder / program
    return path.read_text().splitlines() if path.exists() else []


def test_job_takes_what_there_is_and_outlives_its_nodes() -> None:
    text = script(ELASTIC)

    assert {"nodes=1-4", "no-kill", "signal=B:TERM@120"} <= set(options(text))
    assert "cannot run" not in text


def test_nodes_that_stand_by_are_asked_for_beside_the_most_that_train(tmp_path: Path) -> None:
    values = {"resilience.elastic.nodes_max": 3, "resilience.checkpointless.standby_nodes": 1}

    run(tmp_path, "a,b,c", STEP_NODES="a,b,c", values=values)

    assert "nodes=1-4" in options(script(ELASTIC, **values))
    # With the one that stands by three have come, so the run does not wait for others.
    assert "--nnodes=1:2" in agent_words(tmp_path, "a")


@pytest.mark.parametrize(
    ("nodes", "founders"), [("a", "1:2"), ("a,b", "1:2"), ("a,b,c", "1:3"), ("a,b,c,d", "1:4")]
)
def test_run_begins_with_the_nodes_that_slurm_gives(
    tmp_path: Path, nodes: str, founders: str
) -> None:
    done = run(tmp_path, nodes, STEP_NODES=nodes)

    assert done.returncode == 0, done.stderr
    words = srun_words(tmp_path)
    assert {f"--nodes={len(nodes.split(','))}", "--kill-on-bad-exit=0", "--no-kill"} <= set(words)
    given = set(agent_words(tmp_path, "a"))
    assert {f"--nnodes={founders}", "--rdzv-id=17", "--rdzv-attempt=0", "--ends-run"} <= given


def test_nodes_beyond_an_allowed_number_stand_by(tmp_path: Path) -> None:
    run(tmp_path, "a,b,c", values={"resilience.elastic.nodes_allowed": [1, 3, 4]})

    assert "--nodes=3" in srun_words(tmp_path)


def test_added_node_joins_the_agents_of_the_runs_own_job(tmp_path: Path) -> None:
    """By their addresses, in their start of the run, and under its name."""
    done = run(tmp_path, "a,b,c", OWN, SLURM_JOB_ID="20", STEP_NODES="d", RESTARTS="2",
               SLURM_RESTART_COUNT="1", ADDED_NODES="19:e\n20:d\n")  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert {"--nodes=1", "--ntasks=1"} <= set(srun_words(tmp_path))
    words = agent_words(tmp_path, "d")
    ours = {"--rdzv-endpoint=a:10017,b:10017,c:10017", "--rdzv-id=17", "--rdzv-attempt=2003",
            "--node-name=d", "--memoryd=--peer-listen=0.0.0.0:20017"}  # fmt: skip
    assert ours <= set(words)
    (path,) = (Path(word.rpartition("=")[2]) for word in words if "--peers-file=" in word)
    # Itself and all others: they get to know it as it says hello.
    assert path.read_text() == "".join(f"{each}={each}:20017\n" for each in "edabc")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["slurm-17.2.d.log"]
    assert not asked(tmp_path, "cancelled")


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "CANCELLED"])
def test_node_that_was_added_to_a_job_without_nodes_goes(tmp_path: Path, state: str) -> None:
    done = run(tmp_path, "a,b,c", OWN, SLURM_JOB_ID="20", STATE=state)

    assert done.returncode == 1
    assert done.stderr == ("job.sbatch: job 17, to which this node was added, does not run\n")
    assert not (tmp_path / "srun-words").exists()


@pytest.mark.parametrize(
    ("ended", "status", "expected"),
    [
        pytest.param({"status": 0}, 137, 0, id="a-node-was-lost"),
        pytest.param({"status": 143}, 143, 143, id="it-was-stopped"),
        pytest.param({"status": 0}, 74, 74, id="the-store-lacks-something"),
        pytest.param({"status": 0, "attempt": 999}, 137, 0, id="the-step-was-started-again"),
        pytest.param({"status": 0, "attempt": 1000}, 137, 137, id="another-start"),
        pytest.param({"status": 0, "name": "16"}, 137, 137, id="another-job"),
        pytest.param(None, 137, 137, id="nobody-says-it-has-ended"),
    ],
)  # fmt: skip
def test_status_is_that_of_the_run(
    tmp_path: Path, ended: dict[str, int] | None, status: int, expected: int
) -> None:
    if ended:
        put_end(tmp_path, **ended)  # type: ignore[arg-type]

    assert run(tmp_path, "a,b", SRUN_STATUS=str(status)).returncode == expected


def test_status_is_that_of_the_newest_start(tmp_path: Path) -> None:
    put_end(tmp_path, 143)
    put_end(tmp_path, 0, attempt=1000)

    done = run(tmp_path, "a,b", SRUN_STATUS="137", SLURM_RESTART_COUNT="1")

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("has_ended", "states"), [(True, " --states=PENDING"), (False, "")], ids=["ended", "lost"]
)
def test_added_jobs_end_with_the_run(tmp_path: Path, has_ended: bool, states: str) -> None:
    """Those that run end by themselves, unless they would go on without the run's own job."""
    if has_ended:
        put_end(tmp_path, 0)

    run(tmp_path, "a,b", ADDED="18\n19\n", SRUN_STATUS="137")

    (question,) = asked(tmp_path, "asked")
    name = "--name=llama3-tiny-elastic-17-added"
    assert question == f"--noheader --me {name} --format=%i{states}"
    assert asked(tmp_path, "cancelled") == ["--quiet 18 19"]


def test_added_jobs_of_an_earlier_start_are_ended_before_the_next(tmp_path: Path) -> None:
    """Whose agents could go on with the run while those of the next start begin it."""
    (tmp_path / "size.json").write_text("{}")

    run(tmp_path, "a,b", ADDED="18\n19\n", SLURM_RESTART_COUNT="1")

    assert asked(tmp_path, "cancelled") == ["--quiet 18 19"]
    assert len(asked(tmp_path, "asked")) == 3
    assert not (tmp_path / "size.json").exists()


def signalled(folder: Path, *words: str, **env: str) -> list[str]:
    """Return what is cancelled when Slurm signals the script, and its step ends soon after."""
    put_end(folder, 143)
    run(folder, "a,b", *words, then="kill -TERM $$", ADDED="18\n19\n", **env)
    return asked(folder, "cancelled")


def test_all_agents_are_asked_to_stop_at_once(tmp_path: Path) -> None:
    assert signalled(tmp_path) == ["--quiet --signal=TERM 17 18 19"]


def test_added_node_leaves_by_its_agent_alone(tmp_path: Path) -> None:
    """Once, however often it is asked, since an agent that is asked twice stops the run."""
    (tmp_path / "added").mkdir()
    count = 'trap "echo asked >>agent" TERM; while :; do sleep 0.1; done'
    then = (
        f"bash -c '{count}' & agent=$!; echo $agent >added/18.pid\n"
        "sleep 0.3; kill -USR1 $$; kill -USR1 $$; sleep 0.3; kill -KILL $agent"
    )
    run(tmp_path, "a,b", OWN, then=then, SLURM_JOB_ID="18")

    assert asked(tmp_path, "agent") == ["asked"]
    assert (tmp_path / "added" / "18.left").exists()
    assert not asked(tmp_path, "cancelled")


def test_agent_of_an_added_node_is_not_asked_twice(tmp_path: Path) -> None:
    assert signalled(tmp_path, OWN, SLURM_JOB_ID="18") == []


@pytest.mark.parametrize(
    ("left_s", "words", "is_queued"),
    [
        pytest.param(100, (), True, id="at-the-limit"),
        pytest.param(3600, (), False, id="asked-by-a-person"),
        pytest.param(100, (OWN,), False, id="an-added-node"),
    ],
)
def test_limit_that_slurm_tells_the_script_queues_the_job_again(
    tmp_path: Path, left_s: int, words: tuple[str, ...], is_queued: bool
) -> None:
    saved = '{"step":3,"event":"checkpoint_saved"}'
    run(
        tmp_path, "a,b", *words, values={"time_limit": "01:00:00"}, show=LIMITED,
        then=f"echo '{saved}' >>events.jsonl; kill -TERM $$",
        SLURM_JOB_ID="18" if words else OWN, SRUN_STATUS="143", END=str(int(time.time()) + left_s),
    )  # fmt: skip

    assert asked(tmp_path, "requeued") == ([OWN] if is_queued else [])

"""Jobs that a real Slurm runs, with stand-ins for the nodes' agents."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.shipped import shipped_job
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import Run, Slurm

Submit = Callable[..., Run]
HOSTILE = """it's "so" $(touch pwned) `touch pwned` \\ # ; & | \n second line\t$HOME"""
SECRET = "swordfish-4711"
LIMIT_S = 420
"""Slurm counts limits in minutes, and looks at them every 30 s."""


def word(agent: dict[str, Any], option: str) -> str:
    """Return what an option says, which the workers may be told as well."""
    found = {text for text in agent["words"] if text.startswith(f"--{option}=")}
    assert len(found) == 1, agent["words"]
    return str(found.pop().partition("=")[2])


def test_one_agent_a_node_knows_where_all_are_found(slurm: Slurm, submit: Submit):
    run = submit()

    first, second = run.seen(2)

    assert run.end() == "COMPLETED"
    assert first["node"] < second["node"]
    for agent in (first, second):
        port = 10000 + int(run.job_id) % 10000
        nodes = (first["node"], second["node"])
        assert word(agent, "rdzv-endpoint") == ",".join(f"{node}:{port}" for node in nodes)
        assert (word(agent, "rdzv-id"), word(agent, "rdzv-attempt")) == (run.job_id, "0")
        assert word(agent, "node-name") == agent["node"]
        assert word(agent, "run-dir") == str(run.folder)
        assert word(agent, "job") == str(run.folder / "job.json")
        assert word(agent, "config") == str(run.folder / "node.json")
        assert agent["folder"] == str(run.folder)
        log = run.folder / f"logs/slurm-{run.job_id}.0.{agent['node']}.log"
        assert log.read_text() == f"agent of {agent['node']} start 0\n"


def test_environment_of_the_recipe_reaches_the_agents_as_it_was_written(submit: Submit):
    run = submit(env={"HOSTILE": HOSTILE, "EMPTY": ""}, name="env 'n' $(touch pwned)")

    for agent in run.seen(2):
        assert agent["env"]["HOSTILE"] == HOSTILE
        assert agent["env"]["EMPTY"] == ""
    assert run.end() == "COMPLETED"
    assert not list(run.folder.parent.rglob("pwned"))


def test_agent_has_the_gpus_and_cores_that_the_recipe_asks_for(submit: Submit):
    run = submit(
        instance={"accelerator": "gpu"},
        resources={"num_cpus": 24},
        cluster={"exclusive": False},
    )

    for agent in run.seen(2):
        assert agent["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert agent["env"]["SLURM_CPUS_ON_NODE"] == "24"


def test_pre_script_runs_once_on_each_node_and_sets_up_the_agent(submit: Submit):
    script = 'export SET_UP="$SLURMD_NODENAME"\necho "$UNSET_VARIABLE" >>"pre-$SLURMD_NODENAME"\n'
    run = submit(cluster={"pre_script": script})

    for agent in run.seen(2):
        assert agent["env"]["SET_UP"] == agent["node"]
        assert (run.folder / f"pre-{agent['node']}").read_text() == "\n"


def test_failing_pre_script_fails_the_job_before_any_agent_starts(submit: Submit):
    run = submit(cluster={"pre_script": "ls /absent-folder\n"})

    assert run.end() == "FAILED"
    assert "/absent-folder" in "".join(path.read_text() for path in run.folder.glob("logs/*"))
    assert not list(run.folder.glob("seen-*"))


def test_secrets_reach_the_agents_and_nothing_else(
    slurm: Slurm, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "a secret's file"
    file.touch(mode=0o600)
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("EXPORTED", "given by hand")
    run = submit(
        cluster={"secrets": {"FROM_FILE": {"file": str(file)}, "EXPORTED": {"file": None}}},
    )

    agents = run.seen(2)

    for agent in agents:
        assert agent["env"]["FROM_FILE"] == f"<{len(SECRET)} characters>"
        assert agent["env"]["EXPORTED"] == "given by hand"
    assert run.end() == "COMPLETED"
    found = subprocess.run(
        ["grep", "--recursive", "--text", "--files-with-matches", SECRET, run.folder, slurm.folder],
        capture_output=True,
        text=True,
    )
    assert found.stdout == ""


@pytest.mark.parametrize("by_hand", [False, True], ids=["submit", "by-hand"])
def test_what_the_submitter_exports_reaches_the_agents_by_name_alone(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, by_hand: bool
):
    leaks = {"AWS_SECRET_ACCESS_KEY", "BASH_ENV", "PYTHONPATH", "WANDB_API_KEY", "a_variable"}
    for name in leaks | {"LC_ALL", "EXPORTED"}:
        monkeypatch.setenv(name, "/dev/null" if name == "BASH_ENV" else "C.UTF-8")
    run = submit(cluster={"secrets": {"EXPORTED": {"file": None}}})
    if by_hand:
        run.end()
        for seen in run.folder.glob("seen-*"):
            seen.unlink()
        job_id = run.slurm.ask("sbatch", "--parsable", "job.sbatch", folder=run.folder).strip()
        run = replace(run, job_id=job_id)

    for agent in run.seen(2):
        assert agent["env"]["LC_ALL"] == agent["env"]["EXPORTED"] == "C.UTF-8"
        assert {"HOME", "PATH", "SLURM_CONF", "SLURM_JOB_ID"} <= set(agent["env"])
        # With it the node would load the login environment.
        assert not (leaks | {"SLURM_GET_USER_ENV"}) & set(agent["env"])
    assert run.end() == "COMPLETED"
    unset = re.findall("unset:(.*); to pass", run.log())
    assert [leaks <= set(names.split()) for names in unset] == ([True] if by_hand else [])


def test_recipe_may_leave_the_environment_to_sbatch(
    submit: Submit, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", "all of it")
    run = submit(cluster={"extra_options": {"export": "ALL"}})

    assert [agent["env"]["PYTHONPATH"] for agent in run.seen(2)] == ["all of it"] * 2
    assert run.end() == "COMPLETED"


def test_failing_agent_ends_the_other_nodes_and_gives_the_job_its_status(submit: Submit):
    run = submit(does="fail on the second node")

    first, second = run.seen(2)

    assert run.end() == "FAILED"
    assert run.exit_status == "7"
    assert (run.folder / f"stopped-0-{first['node']}").read_text() == "SIGTERM"
    assert not (run.folder / f"stopped-0-{second['node']}").exists()


def recovering(standby: int) -> dict[str, Any]:
    """Return values of a run that recovers without checkpoints, with nodes that stand by."""
    feature = shipped_job("llama/llama3_tiny_checkpointless", "slurm").resilience.checkpointless
    assert feature
    values = feature.model_dump(mode="json") | {"standby_nodes": standby}
    return {"resilience": {"checkpointless": values}, "resources": {"shm_gib": 1}}


@pytest.mark.parametrize(("standby", "state"), [(1, "COMPLETED"), (0, "FAILED")])
def test_run_that_recovers_outlives_a_killed_agent_where_a_node_stands_by(
    submit: Submit, standby: int, state: str
):
    run = submit(does="die on the second node", **recovering(standby))

    run.seen(2 + standby)
    assert run.end() == state
    assert not list(run.folder.glob("stopped-*"))


def test_agents_of_a_run_with_nodes_that_stand_by_may_end_by_themselves(
    slurm: Slurm, submit: Submit
):
    run = submit(does="wait", **recovering(standby=1))
    run.seen(3)

    slurm.ask("scancel", "--signal=TERM", run.job_id)

    assert [path.read_text() for path in run.wait_for("stopped-0-*", 3)] == ["SIGTERM"] * 3
    assert run.end() == "FAILED"
    assert run.exit_status == "5"


def test_job_stays_on_a_node_that_is_drained_and_begins_again_on_others(
    slurm: Slurm, submit: Submit, request: pytest.FixtureRequest
):
    run = submit(does="finish when restarted")
    node = run.seen(2)[0]["node"]
    update = ("scontrol", "update", f"nodename={node}", "reason=test")
    request.addfinalizer(lambda: slurm.run(*update, "state=resume"))
    slurm.ask(*update, "state=drain")
    assert slurm.field(run.job_id, "JobState") == "RUNNING"
    slurm.ask("scontrol", "requeue", run.job_id)
    assert node not in {agent["node"] for agent in run.seen(2, restart=1)}
    assert (run.folder / f"stopped-0-{node}").read_text() == "SIGTERM"


def test_requeued_job_starts_again_with_logs_and_a_rendezvous_of_its_own(
    slurm: Slurm, submit: Submit
):
    run = submit(does="finish when restarted")
    run.seen(2)

    slurm.ask("scontrol", "requeue", run.job_id)
    again = run.seen(2, restart=1)

    assert run.end() == "COMPLETED"
    for agent in again:
        assert (word(agent, "rdzv-id"), word(agent, "rdzv-attempt")) == (run.job_id, "1000")
        assert agent["env"]["SLURM_RESTART_COUNT"] == "1"
        log = run.folder / f"logs/slurm-{run.job_id}.1.{agent['node']}.log"
        assert log.read_text() == f"agent of {agent['node']} start 1\n"
    assert len(list(run.folder.glob(f"logs/slurm-{run.job_id}.0.*.log"))) == 2


@pytest.mark.parametrize("sent", ["TERM", "USR1", "USR2"])
def test_signal_to_the_batch_script_stops_the_agents(slurm: Slurm, submit: Submit, sent: str):
    run = submit(does="wait")
    run.seen(2)

    slurm.ask("scancel", "--batch", f"--signal={sent}", run.job_id)

    assert [path.read_text() for path in run.wait_for("stopped-0-*", 2)] == ["SIGTERM"] * 2
    assert run.end() == "FAILED"
    assert run.exit_status == "5"


def test_cancelled_job_stops_its_agents_before_it_kills_them(slurm: Slurm, submit: Submit):
    run = submit(does="wait")
    run.seen(2)

    slurm.ask("scancel", run.job_id)

    assert [path.read_text() for path in run.wait_for("stopped-0-*", 2)] == ["SIGTERM"] * 2
    assert run.end() == "CANCELLED"


def test_user_signals_to_all_processes_of_a_step_end_nothing(slurm: Slurm, submit: Submit):
    run = submit(does="wait")
    run.seen(2)

    slurm.ask("scancel", "--signal=USR1", run.job_id)
    slurm.ask("scancel", "--signal=TERM", run.job_id)

    assert [path.read_text() for path in run.wait_for("stopped-0-*", 2)] == ["SIGTERM"] * 2
    assert run.end() == "FAILED"


@pytest.mark.slow  # Slurm looks at time limits every 30 seconds.
def test_agents_are_stopped_ahead_of_the_time_limit(submit: Submit):
    run = submit(
        does="wait", time_limit="00:01:00", cluster={"signal_before_end_s": 60, "requeue": False}
    )

    assert [path.read_text() for path in run.wait_for("stopped-0-*", 2)] == ["SIGTERM"] * 2
    assert run.end() == "FAILED"
    assert run.exit_status == "5"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_job_whose_agents_outlast_the_limit_is_queued_again(submit: Submit):
    settings = shipped_job("llama/llama3_tiny_tiered", "slurm").resilience.tiered
    assert settings
    run = submit(
        does="outlast the limit",
        time_limit="00:01:00",
        cluster={"requeue_at_limit": True},
        resilience={"tiered": settings.model_dump(mode="json")},
    )
    cluster.wait_until(lambda: bool(list(run.folder.glob("seen-1-*"))), "a second start", LIMIT_S)
    assert run.end() == "COMPLETED"
    assert "job.sbatch: the time limit ended the job; it is queued again" in run.log()


def test_script_that_is_called_elsewhere_says_where_to_call_it(
    slurm: Slurm, submit: Submit, tmp_path: Path
):
    run = submit()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    job_id = slurm.ask(
        "sbatch", "--parsable", str(run.folder / "job.sbatch"), folder=elsewhere
    ).strip()

    assert slurm.wait_for_end(job_id) == "FAILED"
    text = "".join(path.read_text() for path in elsewhere.glob("*.log"))
    assert f"no job.json in {elsewhere}; call sbatch in the run's folder" in text

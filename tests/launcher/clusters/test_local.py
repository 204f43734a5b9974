from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.local import render_local
from launcher.job import Job
from tests.launcher.local_job import local_job
from tests.launcher.shipped import TEMPLATES

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
HOSTILE = "two\nlines '\"$(touch pwned) `id` \\ ; & #"
VARIANTS = {
    "plain": (),
    "exported secret": ("+cluster.secrets.HF_TOKEN={}",),
    "secret in a file": ("+cluster.secrets.HF_TOKEN.file=/etc/hf token",),
    "both": ("+cluster.secrets.A={}", "+cluster.secrets.B.file=/b"),
    "checkpoints in memory": ("resilience/tiered=ram",),
    "token and port given": (
        "resilience/tiered=ram",
        'resilience.tiered.token_file="/etc/it\'s"',
        "resilience.tiered.peer_port=9300",
    ),
    "environment": ("+env.NAME='it is $HOME'",),
}
# Stands in for Python: it writes down what it was started with.
FAKE_PYTHON = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def write_scripts(folder: Path, job: Job) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(job.to_json())
    for name, text in render_local(job, TEMPLATES).items():
        (folder / name).write_text(text)


def start_by_hand(
    folder: Path, script: str = "node-0.sh", **env: str
) -> subprocess.CompletedProcess[str]:
    fake = folder / "fake python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return subprocess.run(
        ["bash", str(folder / script)],
        env={"PATH": os.environ["PATH"], "LAUNCHER_PYTHON": str(fake), **env},
        capture_output=True,
        text=True,
    )


def started(folder: Path, job: Job, script: str = "node-0.sh", **env: str) -> tuple[Any, Any]:
    """Return the words and the variables that a node of a job starts its agent with."""
    write_scripts(folder, job)
    return tuple(json.loads(start_by_hand(folder, script, **env).stdout))


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_scripts_pass_bash_and_shellcheck(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    write_scripts(tmp_path, local_job(*overrides))
    scripts = sorted(tmp_path.glob("*.sh"))

    checked = subprocess.run(
        [SHELLCHECK, "--norc", *scripts], capture_output=True, text=True, check=False
    )

    assert [path.name for path in scripts] == ["node-0.sh", "node-1.sh"]
    assert checked.stdout == ""
    assert all(subprocess.run(["bash", "-n", path]).returncode == 0 for path in scripts)


def test_node_starts_the_agent_with_the_folder_it_lies_in(tmp_path: Path) -> None:
    folder = tmp_path / "some where"
    job = local_job("trainer.threads_per_worker=3", "run.name=tiny")

    arguments, env = started(folder, job, "node-1.sh", CDPATH=str(tmp_path))

    assert arguments[:2] == ["-m", "resilience.agent"]
    assert f"--config={folder}/node.json" in arguments
    assert "--rdzv-endpoint=127.0.0.1:29500,127.0.0.1:29501" in arguments
    assert "--rdzv-id=tiny-0" in arguments
    assert f"--job={folder}/job.json" in arguments
    assert f"--run-dir={folder}" in arguments
    assert arguments[-1].endswith("=node-1")
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["GLOO_SOCKET_IFNAME"] == "lo"


def test_all_nodes_have_one_token_which_the_first_one_makes(tmp_path: Path) -> None:
    write_scripts(tmp_path, local_job())

    starts = [start_by_hand(tmp_path, f"node-{index}.sh") for index in (0, 1, 0)]

    (path,) = (path for path in tmp_path.iterdir() if "token" in path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token := path.read_text().strip()) == 44
    for done in starts:
        arguments, variables = json.loads(done.stdout)
        assert f"--token-file={path}" in arguments
        assert token not in done.stdout
        assert token not in variables.values()


def test_launcher_chooses_rendezvous_and_run_id(tmp_path: Path) -> None:
    given = {"LAUNCHER_RDZV_ENDPOINT": "127.0.0.1:1", "LAUNCHER_RUN_ID": "7"}

    arguments, _ = started(tmp_path, local_job("run.name=tiny"), **given)

    assert {"--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=tiny-7"} <= set(arguments)


def test_environment_arrives_as_it_is_and_wins_over_ours(tmp_path: Path) -> None:
    own = {"TEXT": HOSTILE, "OMP_NUM_THREADS": "9"}

    _, env = started(tmp_path, local_job().model_copy(update={"env": own}))

    assert env["TEXT"] == HOSTILE
    assert env["OMP_NUM_THREADS"] == "9"
    assert not Path("pwned").exists()


def test_script_without_its_job_says_so(tmp_path: Path) -> None:
    write_scripts(tmp_path, local_job())
    (tmp_path / "job.json").unlink()

    done = start_by_hand(tmp_path)

    assert (done.returncode, done.stderr) == (2, f"node-0.sh: no job.json in {tmp_path}\n")


def test_secret_file_reaches_the_workers_by_the_environment_alone(tmp_path: Path) -> None:
    secret = tmp_path / "the key"
    secret.write_text("s3cr3t $x\n")
    secret.chmod(0o600)
    job = local_job(f"+cluster.secrets.HF_TOKEN.file='{secret}'")

    arguments, env = started(tmp_path / "run", job)

    assert env["HF_TOKEN"] == "s3cr3t $x"
    assert "s3cr3t" not in str(arguments)
    assert not [path for path in (tmp_path / "run").iterdir() if "s3cr3t" in path.read_text()]


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        pytest.param(0o644, "x", "{file} has mode 644; allowed: 600", id="readable-by-others"),
        pytest.param(0o600, "\n", "{file} is empty", id="empty"),
        pytest.param(None, "", "no file {file}", id="missing"),
    ],
)
def test_secret_file_that_cannot_be_used_ends_the_node(
    tmp_path: Path, mode: int | None, content: str, message: str
) -> None:
    secret = tmp_path / "key"
    if mode is not None:
        secret.write_text(content)
        secret.chmod(mode)
    write_scripts(tmp_path / "run", local_job(f"+cluster.secrets.HF_TOKEN.file={secret}"))

    done = start_by_hand(tmp_path / "run")

    expected = f"node-0.sh: secret HF_TOKEN: {message.format(file=secret)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_exported_secret_is_asked_for_by_name(tmp_path: Path) -> None:
    write_scripts(tmp_path, local_job("+cluster.secrets.HF_TOKEN={}"))

    without, given = start_by_hand(tmp_path), start_by_hand(tmp_path, HF_TOKEN="abc")

    assert without.returncode == 2
    assert without.stderr == (
        "node-0.sh: secret HF_TOKEN is not set; export it, "
        "or name its file as cluster.secrets.HF_TOKEN.file\n"
    )
    assert json.loads(given.stdout)[1]["HF_TOKEN"] == "abc"

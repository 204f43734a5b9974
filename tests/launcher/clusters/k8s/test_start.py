"""The start script, run by a shell with programs that only print their words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.k8s_job import KINDS, LARGE, TINY, documents, k8s_job

SHELLCHECK = Path(sys.executable).parent / "shellcheck"
TIERED = "llama/llama3_tiny_tiered"
ODD_TEXTS = ("a b", "'", '"', "$HOME", "`id`", "$(id)", "\\", "{{ x }}", "*", "a;b", "\u00e9")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\necho "X=$X"\n')
    program.chmod(0o755)
    return tmp_path


def start(
    folder: Path,
    kind: str,
    changes: dict[str, Any],
    script: str = "start.sh",
    recipe: str = TINY,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run the start script as a pod would, its ConfigMap being in `folder`."""
    for name, text in documents(k8s_job(kind, changes, recipe))["ConfigMap"]["data"].items():
        (folder / name).write_text(text.replace("/etc/training", str(folder)))
    token = Path(f"{folder}-token", "token")
    token.parent.mkdir(exist_ok=True)
    token.write_text("t")
    return subprocess.run(
        ["sh", folder / script],
        env={"PATH": f"{folder}:/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


ELASTIC = "llama/llama3_tiny_elastic"


@pytest.mark.parametrize(("index", "is_further"), [("0", False), ("1", True), ("3", True)])
def test_further_nodes_of_an_elastic_run_are_told_that_they_are(
    folder: Path, index: str, is_further: bool
) -> None:
    variables = {"LAUNCHER_POD_IP": "10.0.0.7", "LAUNCHER_JOB_UID": "1-2"}

    done = start(folder, "job", {}, recipe=ELASTIC,
                 JOB_COMPLETION_INDEX=index, **variables)  # fmt: skip

    words = done.stdout.splitlines()
    assert ("--further-node" in words) == is_further
    assert "" not in words
    assert f"--node-name=llama3-tiny-elastic-{index}" in words
    # All nodes that there may be, whichever have come.
    (endpoints,) = (each for each in words if each.startswith("--rdzv-endpoint="))
    assert endpoints.count(":29500") == 4
    assert "--rdzv-id=llama3-tiny-elastic-1-2" in words


@pytest.mark.parametrize(("recipe", "told"), [(LARGE, ["start.sh: a process of"]), (TINY, [])])
def test_a_limit_of_locked_memory_is_said_where_efa_is_asked_for(
    folder: Path, recipe: str, told: list[str]
) -> None:
    done = start(folder, "hyperpod", {"cluster.pre_script": "ulimit -l 64\n"}, recipe=recipe)

    assert [line[:22] for line in done.stderr.splitlines()] == told
    assert ("may lock 64 KiB of memory" in done.stderr) == bool(told)
    assert "-m" in done.stdout.splitlines()


OTHER = "llama3-tiny-pretrain-{}.llama3-tiny-pretrain:29500"


@pytest.mark.parametrize(
    ("index", "address", "endpoints"),
    [
        ("0", "10.0.0.7", f"10.0.0.7:29500,{OTHER.format(1)}"),
        ("1", "10.0.0.7", f"{OTHER.format(0)},10.0.0.7:29500"),
        ("1", "fd00::7", f"{OTHER.format(0)},[fd00::7]:29500"),
    ],
)
def test_plain_job_starts_the_agent_on_each_node(
    folder: Path, index: str, address: str, endpoints: str
) -> None:
    """Which knows where all of them are found, itself also before its name is in DNS."""
    env = {"LAUNCHER_POD_IP": address, "LAUNCHER_JOB_UID": "0e3c"}
    done = start(folder, "job", {}, JOB_COMPLETION_INDEX=index, **env)

    assert done.stderr == ""
    assert done.stdout.splitlines()[:-1] == [
        f"{folder}/python", "-m", "resilience.agent", f"--config={folder}/node.json",
        f"--rdzv-endpoint={endpoints}", "--rdzv-id=llama3-tiny-pretrain-0e3c",
        f"--local-addr={address}", f"--node-name=llama3-tiny-pretrain-{index}",
        f"--token-file={folder}-token/token",
        "--run-dir=/run/training/llama3-tiny-pretrain", "--grace-s=55",
        "--preload=recipes_training.preload", "--",
        "python", "-m", "recipes_training", f"--job={folder}/job.json",
        "--run-dir=/run/training/llama3-tiny-pretrain",
        f"--node-name=llama3-tiny-pretrain-{index}",
    ]  # fmt: skip


def test_pods_that_stand_by_are_asked_as_well(folder: Path) -> None:
    changes = {"resilience.checkpointless.standby_nodes": 1, "cluster.rdzv_port": 4000}
    recipe = "llama/llama3_tiny_checkpointless"

    done = start(folder, "job", changes, recipe=recipe, JOB_COMPLETION_INDEX="2",
                 LAUNCHER_POD_IP="10.0.0.7")  # fmt: skip

    name = "llama3-tiny-checkpointless"
    others = ",".join(f"{name}-{index}.{name}:4000" for index in (0, 1))
    assert f"--rdzv-endpoint={others},10.0.0.7:4000" in done.stdout.splitlines()


def test_hyperpod_starts_the_agent_that_waits_for_the_operator(folder: Path) -> None:
    networks = {"cluster.operator_from": ["10.0.0.0/8", "fc00::/7"]}
    pod = {"LAUNCHER_POD_NAME": "x-pods-1", "LAUNCHER_POD_IP": "10.0.0.7"}

    done = start(folder, "hyperpod", networks, **pod)

    assert done.stderr == ""
    assert done.stdout.splitlines()[:-1] == [
        f"{folder}/python", "-m", "resilience.agent", f"--config={folder}/node.json",
        "--rdzv-id=llama3-tiny-pretrain-e3b98a4da31a", "--local-addr=10.0.0.7",
        "--operator-port=8080",
        "--operator-from=10.0.0.0/8", "--operator-from=fc00::/7", "--node-name=x-pods-1",
        f"--token-file={folder}-token/token", "--run-dir=/run/training/llama3-tiny-pretrain",
        "--grace-s=55", "--preload=recipes_training.preload", "--",
        "python", "-m", "recipes_training", f"--job={folder}/job.json",
        "--run-dir=/run/training/llama3-tiny-pretrain", "--node-name=x-pods-1",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_run_path_with_odd_characters_reaches_the_program(
    folder: Path, kind: str, text: str
) -> None:
    done = start(folder, kind, {"cluster.run_path": f"/run/{text}"}, JOB_COMPLETION_INDEX="0")

    assert done.stderr == ""
    assert f"--run-dir=/run/{text}/llama3-tiny-pretrain" in done.stdout.splitlines()


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_interpreter_in_a_folder_with_an_odd_name_is_started(folder: Path, text: str) -> None:
    odd = folder / f"p {text}"
    odd.mkdir()
    (folder / "python").rename(odd / "python")

    done = start(folder, "job", {"cluster.python": f"{odd}/python"}, JOB_COMPLETION_INDEX="0")

    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == f"{odd}/python"


@pytest.mark.parametrize("kind", KINDS)
def test_pre_script_runs_first_and_its_variables_reach_the_workers(folder: Path, kind: str) -> None:
    script = "echo 'it'\"'\"'s first' # {{ not }} a $(template)\nexport X=\"a  b\""

    done = start(folder, kind, {"cluster.pre_script": script}, JOB_COMPLETION_INDEX="0")

    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "it's first"
    assert done.stdout.splitlines()[-1].endswith("X=a  b")


@pytest.mark.parametrize("kind", KINDS)
def test_pod_fails_where_its_pre_script_does(folder: Path, kind: str) -> None:
    done = start(folder, kind, {"cluster.pre_script": "false\necho on"}, JOB_COMPLETION_INDEX="0")

    assert done.returncode == 1
    assert done.stdout == ""


def test_pre_script_makes_python_known_to_the_daemon_as_well(folder: Path) -> None:
    """As one does that activates a venv."""
    (folder / "venv").mkdir()
    (folder / "python").rename(folder / "venv/python")
    changes = {"cluster.pre_script": f"PATH={folder}/venv:$PATH\n"}

    done = start(folder, "job", changes, script="memoryd.sh", recipe=TIERED)

    assert done.stderr == ""
    assert done.stdout.splitlines()[:3] == [f"{folder}/venv/python", "-m",
                                            "resilience.tiered.memoryd"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_script_is_sound_shell(kind: str) -> None:
    """SC1091: the pre-script is not there to be followed."""
    scripts = [
        documents(full_job(kind))["ConfigMap"]["data"]["start.sh"],
        *(
            text
            for name, text in documents(k8s_job(kind, recipe=TIERED))["ConfigMap"]["data"].items()
            if name == "memoryd.sh"
        ),
        documents(k8s_job(kind, recipe=ELASTIC))["ConfigMap"]["data"]["start.sh"],
    ]

    for script in scripts:
        done = subprocess.run(
            [SHELLCHECK, "--severity=style", "--exclude=SC1091", "-"],
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
        )

        assert done.stdout == ""
        assert done.returncode == 0

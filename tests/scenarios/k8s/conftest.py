"""A real Kubernetes: one that a script beside the repository starts, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.k8s.values import JOB_LABEL
from launcher.clusters.running.cluster import RunFolder
from tests import waiting

ROOT = Path(__file__).parents[3]
SANDBOX = ROOT.parent / "shared/sandbox/k8s.sh"
DEFINITION = Path(__file__).with_name("hyperpodpytorchjob.yaml")
START_TIMEOUT_S = 300
COMMAND_TIMEOUT_S = 60
wait_until = partial(waiting.wait_until, limit_s=90.0, pause_s=0.1)


def kubectl(config: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", f"--kubeconfig={config}", *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


class Asked:
    """A cluster as kubectl sees it, with the pods of runs there."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._config = config
        self._folder = folder

    def ask(self, *words: str, text: str | None = None) -> str:
        done = kubectl(self._config, *words, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pods(self, run: RunFolder) -> list[str]:
        words = ("get", "pods", f"--selector={JOB_LABEL}={run.job.name}", "--output=name")
        return self.ask(*words).split()

    def play(self, pod: str, **status: Any) -> None:
        """Have a pod that no node has be what this status says."""
        patch = json.dumps({"status": status})
        self.ask("patch", pod, "--subresource=status", "--type=merge", f"--patch={patch}")


def end_at_first_failure(job: dict[str, Any]) -> None:
    """Have the first pod of a Job that fails end it, at any index."""
    for field in ("backoffLimitPerIndex", "maxFailedIndexes"):
        job["spec"].pop(field, None)
    job["spec"]["backoffLimit"] = 0


@pytest.fixture(scope="session")
def kube_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of an API server of our own, without nodes, that knows our kinds."""
    with _cluster(tmp_path_factory.mktemp("k8s"), num_nodes=0) as config:
        _define(config)
        yield config


@pytest.fixture
def kube_with_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a cluster of two nodes, whose pods have this checkout at its place.

    The network of the first node holds to policies.
    """
    yield from _with_pods(tmp_path_factory, "network-policies")


@pytest.fixture
def kube_with_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with the controllers of JobSet, of Kubeflow's Trainer and of Kueue."""
    yield from _with_pods(tmp_path_factory, "trainer", "kueue")


def _with_pods(factory: pytest.TempPathFactory, *controllers: str) -> Iterator[Path]:
    folders = {str(ROOT), sys.base_prefix, sys.prefix}
    own = {
        "K8S_SHARE": " ".join(sorted(folders)),
        "K8S_IMAGE_PATH": f"{sys.prefix}/bin:/usr/bin:/bin",
    }
    with _cluster(factory.mktemp("pods"), num_nodes=2, **own) as config:
        started = _sandbox("controllers", config.parent, *controllers)
        assert started.returncode == 0, started.stderr
        yield config


@contextmanager
def _cluster(folder: Path, *, num_nodes: int, **variables: str) -> Iterator[Path]:
    if not SANDBOX.exists() or shutil.which("kubectl") is None:
        pytest.skip(f"no {SANDBOX} or no kubectl, so no Kubernetes of our own")
    try:
        started = _sandbox("up", folder, str(num_nodes), **variables)
        if "missing packages" in started.stderr:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        yield folder / "admin.kubeconfig"
    finally:
        _sandbox("down", folder)


def _sandbox(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with files for its output: its daemons would keep a pipe open."""
    folder = words[1]
    assert isinstance(folder, Path)
    # The system's own python3 may lack what the script calls.
    path = f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    own = {"PATH": path, "HOME": str(folder), "K8S_INSTALL": "0"}
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(
            ["bash", SANDBOX, *map(str, words)],
            env=own | variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            timeout=START_TIMEOUT_S,
        )
    return subprocess.CompletedProcess(done.args, done.returncode, out.read_text(), err.read_text())


def _define(config: Path) -> None:
    for words in (
        ("apply", f"--filename={DEFINITION}"),
        ("wait", "--for=condition=Established", f"--filename={DEFINITION}", "--timeout=30s"),
    ):
        done = kubectl(config, *words)
        assert done.returncode == 0, done.stderr

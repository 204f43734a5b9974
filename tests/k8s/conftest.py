"""A real Kubernetes API: one that a script beside the repository starts, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SANDBOX = Path(__file__).parents[3] / "shared/sandbox/k8s.sh"
DEFINITION = Path(__file__).with_name("hyperpodpytorchjob.yaml")
START_TIMEOUT_S = 300
COMMAND_TIMEOUT_S = 60


def kubectl(config: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", f"--kubeconfig={config}", *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )


@pytest.fixture(scope="session")
def kube_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of an API server of our own, without nodes, that knows our kinds."""
    if not SANDBOX.exists() or shutil.which("kubectl") is None:
        pytest.skip(f"no {SANDBOX} or no kubectl, so no Kubernetes API of our own")
    folder = tmp_path_factory.mktemp("k8s")
    try:
        started = _sandbox("up", folder, "0")
        if "missing packages" in started.stderr:
            pytest.skip(started.stderr.strip())
        assert started.returncode == 0, started.stderr
        config = folder / "admin.kubeconfig"
        _define(config)
        yield config
    finally:
        _sandbox("down", folder)


def _sandbox(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the script with files for its output: its daemons would keep a pipe open."""
    folder = words[1]
    assert isinstance(folder, Path)
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        done = subprocess.run(
            ["bash", SANDBOX, *map(str, words)],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder), "K8S_INSTALL": "0"},
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

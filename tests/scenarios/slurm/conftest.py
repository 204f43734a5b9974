from __future__ import annotations

import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.running.memory import find_arenas
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import Run, Slurm, merge, stand_in, submit_run

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Slurm]:
    """Four nodes that answer, until the session ends in whichever way."""
    if missing := cluster.missing_program():
        pytest.skip(f"no {missing} on this machine; scripts/install-test-tools.sh installs it")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    if len(str(folder)) > cluster.PATH_LENGTH_MAX:
        folder.rmdir()
        pytest.fail(f"{folder} is too long for a Unix socket; set TMPDIR to a shorter folder")
    with subprocess.Popen(
        [sys.executable, str(Path(cluster.__file__)), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as keeper:
        assert keeper.stdin
        assert keeper.stdout
        try:
            answered, _, _ = select.select([keeper.stdout], [], [], START_TIMEOUT_S)
            if not answered or keeper.stdout.readline() != b"ready\n":
                pytest.fail(f"Slurm did not start:\n{_logs(folder)}")
            yield Slurm(folder)
        finally:
            # The end of its input makes the keeper stop everything, also where we are killed.
            keeper.stdin.close()
            keeper.wait(STOP_TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)


def _logs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
        for path in sorted((folder / "log").glob("*"))
    )


@pytest.fixture
def slurm(slurm_cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The cluster, which this process's own sbatch reaches; no job outlives the test.

    Nor do the checkpoints that a run keeps in the memory of its nodes until it goes on.
    """
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm_cluster.environment[name])
    yield slurm_cluster
    slurm_cluster.run("scancel", "--quiet", "--partition=main")
    slurm_cluster.run("scancel", "--quiet", "--partition=large")
    slurm_cluster.wait_until(
        lambda: not slurm_cluster.ask("squeue", "--noheader"), "no job is left"
    )
    for submitted in tmp_path.rglob("submitted.json"):
        for arena in find_arenas(submitted.parent):
            shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Callable[..., Run]:
    """Submit the tiny Llama with other values; `does` is what its stand-in agents do."""

    def submitted(*, does: str = "finish", name: str = "a run's folder", **values: Any) -> Run:
        ours = {"cluster": {"python": stand_in(tmp_path)}, "env": {"STAND_IN": does}}
        return submit_run(slurm, tmp_path / name, merge(ours, values))

    return submitted

"""Runs on this machine with checkpoints in memory: what is beside the workers, and what stays."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from resilience.tiered.arena_folder import find_arenas
from resilience.tiered.client import TieredClient
from resilience.tiered.memoryd.local import SOCKET_NAME
from tests.launcher.command import TIMEOUT_S
from tests.launcher.local_job import local_job
from tests.launcher.shipped import rendered
from tests.processes import command_of, descendants, wait_for_end
from tests.resilience.tiered.daemons import make_content, make_id, save

SHM = Path("/dev/shm")
# Starts the agents as they are, with workers that say that they are there, and do as they are told.
PYTHON = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if words[1] == "resilience.agent":
    folder, node = (word.partition("=")[2] for word in words[-2:])
    words = [word for word in words[: words.index("--")] if not word.startswith("--preload")]
    words += ["--preload=json", "--", "python", folder + "/worker.py", folder, node]
os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""
WORKER = """
import os, pathlib, sys
folder, node = pathlib.Path(sys.argv[1]), sys.argv[2]
told = os.open(folder / "told", os.O_RDONLY)
rank = os.environ["RANK"]
(folder / f"{node}.{rank}").write_text(os.environ["MEMORYD_DIR"])
sys.exit(int(os.read(told, 1)))
"""
RUN = """
import sys
from pathlib import Path
from launcher.clusters.local_run import run_nodes
from launcher.job import read_job
folder = Path(sys.argv[1])
sys.executable = str(folder / "python")
sys.exit(run_nodes(read_job(folder / "job.json"), folder))
"""


class Run:
    """A launcher in a process of its own, with the nodes it has started."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        job = local_job(*(overrides or ("resilience/tiered=ram",)))
        (folder / "job.json").write_text(job.to_json())
        for name, text in rendered(job).items():
            (folder / name).write_text(text)
        os.mkfifo(folder / "told")
        (folder / "worker.py").write_text(WORKER)
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        self._told = os.open(folder / "told", os.O_RDWR)
        with (folder / "console").open("wb") as console:
            self.process = subprocess.Popen([sys.executable, "-c", RUN, str(folder)],
                                            stdout=console)  # fmt: skip

    def wait_for_workers(self) -> None:
        """Block until all workers run."""
        deadline = 2 * TIMEOUT_S
        while len(self.workers()) < 4:
            deadline -= 1
            assert deadline, self.log()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)

    def workers(self) -> dict[str, Path]:
        """Return the folders that the workers were told of."""
        files = self.folder.glob("node-?.[0-9]")
        return {each.name: Path(text) for each in files if (text := each.read_text())}

    def arenas(self) -> list[Path]:
        return sorted(set(self.workers().values()))

    def tell(self, status: int) -> None:
        os.write(self._told, f"{status}".encode() * 4)

    def close(self) -> None:
        """Let go of what the workers read."""
        os.close(self._told)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "logs").rglob("*.log")))

    def console(self) -> list[str]:
        """Return the lines that a person has seen."""
        return (self.folder / "console").read_text().splitlines()

    def daemons(self) -> list[int]:
        """Return the daemons that have said they are ready, oldest first."""
        return [int(pid) for pid in re.findall(r"memoryd (\d+) of node-\d is ready", self.log())]


@contextmanager
def running(folder: Path, *overrides: str) -> Iterator[Run]:
    started = Run(folder, *overrides)
    try:
        yield started
    finally:
        started.close()
        started.process.kill()
        started.process.wait()
        for arena in find_arenas(folder):
            shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path, "resilience/tiered=ram", "cluster.tls=true") as started:
        started.wait_for_workers()
        yield started


def test_run_that_succeeds_leaves_no_memory_behind(run: Run) -> None:
    commands = [command_of(each).split(b"\0") for each in run.daemons()]
    assert [b"--tls" in each for each in commands] == [True, True]
    arenas = run.arenas()
    token = run.folder / "run.token"
    assert [folder.parent for folder in arenas] == [SHM, SHM]
    assert all((folder / "memoryd.sock").exists() for folder in arenas)
    assert token.stat().st_mode & 0o777 == 0o600

    run.tell(0)

    assert run.process.wait(TIMEOUT_S) == 0, run.log()
    assert not any(folder.exists() for folder in arenas)


def of_store(store: Path, *more: str) -> tuple[str, ...]:
    url = f"resilience.tiered.store.url=folder:{store}"
    return "resilience/tiered=folder", url, "resilience.tiered.store.deadline_s=1", *more


def test_run_whose_store_cannot_be_used_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"")

    with running(tmp_path, *of_store(tmp_path / "disk" / "store")) as run:
        assert run.process.wait(TIMEOUT_S) == 1

    assert run.workers() == {}
    assert "memoryd cannot use its store: writing " in run.log()
    assert any("Not a directory" in line for line in run.console())


@pytest.mark.parametrize("is_required", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_run_whose_store_lacks_something_says_so_at_its_end(
    tmp_path: Path, is_required: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    required = f"resilience.tiered.store.required={is_required}".lower()
    with running(tmp_path, *of_store(disk / "store", required)) as run:
        run.wait_for_workers()
        (arena,) = (each for each in run.arenas() if each.name.endswith("node-0"))
        shutil.rmtree(disk)
        disk.write_bytes(b"")
        token = (tmp_path / "run.token").read_text().strip()
        with TieredClient(arena / SOCKET_NAME, token=token, namespace="r", job="j") as client:
            save(client, make_id(7, name="r"), make_content(1000))
            client.flush(step=7, generation=0)

        run.tell(0)

        assert run.process.wait(2 * TIMEOUT_S) == (74 if is_required else 0), run.log()
        assert arena.exists() is is_required
    assert run.console()[-1].startswith("  store       the store fails on node-0 for ")
    assert any(
        line.startswith("[node-0] ") and "the store lacks step 7" in line for line in run.console()
    )


@pytest.mark.slow
def test_run_that_fails_leaves_its_checkpoints_and_nothing_else(run: Run) -> None:
    started = descendants(run.process.pid)

    run.tell(7)

    assert run.process.wait(TIMEOUT_S) == 7
    for pid in started:
        wait_for_end(pid)
    for folder in run.arenas():
        assert folder.is_dir()
        assert not (folder / "memoryd.sock").exists()


@pytest.mark.slow
def test_daemon_that_is_killed_is_there_again(run: Run) -> None:
    before = run.daemons()

    os.kill(before[0], signal.SIGKILL)
    wait_for_end(before[0])

    for _ in range(2 * TIMEOUT_S):
        if len(run.daemons()) > len(before):
            break
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.5)
    assert len(run.daemons()) == len(before) + 1, run.log()
    run.tell(0)
    assert run.process.wait(TIMEOUT_S) == 0, run.log()

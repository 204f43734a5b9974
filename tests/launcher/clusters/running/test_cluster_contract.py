"""The contract of clusters, held by this machine.

Slurm and Kubernetes hold it in tests/scenarios, where they are started.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.clusters.running.cluster import RunFolder, read_run_folder
from launcher.clusters.running.local import LocalMachine
from launcher.clusters.running.lock import read_lock
from resilience.agent.evidence.locks import LAUNCHER_LOCK
from tests.launcher.clusters.running.cluster_suite import ClusterContract
from tests.launcher.local_world import end_all, launcher_of, prepare, start_run, tell
from tests.processes import wait_for_end


class LocalWorld:
    cluster = LocalMachine()
    has_queue = False
    remembers_deleted = True
    has_logs = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[Path] = []

    def start(self, *, is_held: bool = False) -> RunFolder:
        assert not is_held
        path = start_run(self._folder)
        self._runs.append(path)
        return read_run_folder(path)

    def begin(self, run: RunFolder) -> None:
        """Do nothing: it runs at once."""

    def end(self, run: RunFolder, status: int) -> None:
        tell(run.path, status)

    def end_from_outside(self, run: RunFolder) -> None:
        os.kill(launcher_of(run.path), signal.SIGTERM)

    def forget(self, run: RunFolder) -> RunFolder:
        """Kill its launcher, which says nothing any more."""
        pid = launcher_of(run.path)
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        return run

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Have the folder be one that is seen from another machine."""
        locks = [path / LAUNCHER_LOCK for path in self._runs]
        for lock in locks:
            # The lock itself stays with the launcher's file.
            lock.rename(lock.with_suffix(".there"))
            content = json.loads(lock.with_suffix(".there").read_text())
            lock.write_text(json.dumps(content | {"host": "far", "boot_id": "another"}))
        yield
        for lock in locks:
            lock.with_suffix(".there").rename(lock)


class TestLocal(ClusterContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[LocalWorld]:
        prepare(tmp_path)
        yield LocalWorld(tmp_path)
        for path in (tmp_path / "runs").glob("*"):
            if (holder := read_lock(path)) and holder.is_held and holder.is_here:
                assert holder.pid != os.getpid()
        end_all(tmp_path)

"""The processes of a local run: one keeper a node, and through it all it starts.

Owns starting and ending them. Why a run ends is decided in `local_run`.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import launcher
from launcher.clusters import keeper
from launcher.clusters.local_files import log_path, script_name
from launcher.errors import OutsideError
from resilience.plain_files import open_plain

_KEEPER = Path(keeper.__file__)
_PACKAGE = Path(launcher.__file__).resolve().parent
_RUN_ID = "LAUNCHER_RUN_ID"
_NODE = "LAUNCHER_NODE"
_FOLDER = "LAUNCHER_RUN_DIR"
# A keeper ends a node in the grace period; this much more, and it is taken for lost.
_MARGIN_S = 10.0


class LocalNodes:
    """The nodes of one run. Leaving the block ends those that still run."""

    def __init__(self, run_dir: Path, names: Sequence[str], *, grace_s: float) -> None:
        self.grace_s = grace_s
        self.run_dir = run_dir
        self._names = tuple(names)
        self._run_id = uuid.uuid4().hex
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._environment: Mapping[str, str] = {}
        self._files: dict[str, int] = {}

    @property
    def run_id(self) -> str:
        """Return what stands in the environment of every process of the run."""
        return self._run_id

    @property
    def running(self) -> tuple[str, ...]:
        """Return the nodes that have not been seen to end, in the order of their starts."""
        return tuple(self._running)

    def start(
        self, rdzv_endpoint: str, selector: selectors.BaseSelector, peer_ports: Sequence[int] = ()
    ) -> None:
        """Start every node; the selector wakes for one that ends, with its name as data.

        `peer_ports` are those of the nodes' checkpoint daemons, where the run has them.
        Raises OutsideError where a process cannot be started.
        """
        environment = node_environment(os.environ, rdzv_endpoint, self._run_id)
        if peer_ports:
            environment["LAUNCHER_PEER_PORTS"] = " ".join(map(str, peer_ports))
        self._environment = environment
        for name in self._names:
            self.add(name, selector)

    def add(self, name: str, selector: selectors.BaseSelector) -> None:
        """Start a node as `start` has started the others."""
        try:
            log_path(self.run_dir, name).parent.mkdir(exist_ok=True)
            self._running[name] = self._start(name, self._environment)
            self._files[name] = os.pidfd_open(self._running[name].pid)
            selector.register(self._files[name], selectors.EVENT_READ, name)
        except OSError as error:
            raise OutsideError(f"cannot start {name}: {error}") from error

    def _start(self, name: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", str(_KEEPER), str(self.grace_s)]
        with open(log_path(self.run_dir, name), "ab", opener=open_plain) as log:
            return subprocess.Popen(
                [*command, "bash", str(self.run_dir / script_name(name))],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, _NODE: name, _FOLDER: str(self.run_dir.resolve())},
                start_new_session=True,
            )

    def collect(self, name: str, selector: selectors.BaseSelector) -> int:
        """Return the exit status of a node that the selector said has ended."""
        process = self._running.pop(name)
        file = self._files.pop(name)
        selector.unregister(file)
        os.close(file)
        status = process.wait()
        _close_input(process)
        if status < 0:
            # The keeper itself was killed, and could not end what it owned.
            end_strays(self._run_id, name)
        return keeper.shell_status(status)

    def stop_node(self, name: str) -> None:
        """Ask a node to end within the grace period."""
        _close_input(self._running[name])

    def stop(self) -> None:
        """Ask every node to end within the grace period; a second call does nothing."""
        for process in self._running.values():
            _close_input(process)

    def kill(self) -> None:
        """End every node at once."""
        for process in self._running.values():
            process.terminate()

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        deadline = time.monotonic() + self.grace_s + _MARGIN_S
        for name, process in self._running.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                end_strays(self._run_id, name)
        for file in self._files.values():
            os.close(file)
        self._running.clear()
        self._files.clear()


def node_environment(
    ours: Mapping[str, str], rdzv_endpoint: str, run_id: str, package: Path = _PACKAGE
) -> dict[str, str]:
    """Return the variables a node's script gets: ours, and what it asks of a launcher.

    In a checkout the workers import the same files as the launcher.
    """
    environment = {
        **ours,
        "LAUNCHER_PYTHON": sys.executable,
        "LAUNCHER_RDZV_ENDPOINT": rdzv_endpoint,
        _RUN_ID: run_id,
        "PYTHONUNBUFFERED": "1",
    }
    if not (package / "_data").is_dir():
        known = ours.get("PYTHONPATH")
        environment["PYTHONPATH"] = (
            f"{package.parent}{os.pathsep}{known}" if known else str(package.parent)
        )
    return environment


def find_strays(run_id: str, name: str | None = None, run_dir: Path | None = None) -> set[int]:
    """Return the processes that carry a run's id, and a node's name and a folder where given.

    A folder says for itself which run's it is: a copy names the run that it was copied from.
    """
    folder = run_dir and str(run_dir.resolve())
    wanted = {_RUN_ID: run_id, _NODE: name, _FOLDER: folder}
    marks = {os.fsencode(f"{key}={value}") for key, value in wanted.items() if value}
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if marks <= _variables(pid)}


def end_strays(
    run_id: str, name: str | None = None, run_dir: Path | None = None
) -> tuple[set[int], set[int]]:
    """Kill every process that `find_strays` finds, until there is none.

    Waits for at most ten seconds in all: a process may be stuck in the kernel. Returns which were
    found, and which of them are left.
    """
    deadline = time.monotonic() + _MARGIN_S
    found: set[int] = set()
    while True:
        strays = find_strays(run_id, name, run_dir)
        found |= strays
        if not strays or time.monotonic() > deadline:
            return found, strays
        for pid in strays:
            _kill(pid, max(0.0, deadline - time.monotonic()))


def _kill(pid: int, timeout_s: float) -> None:
    with suppress(ProcessLookupError):
        file = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(file, signal.SIGKILL)
            select.select([file], [], [], timeout_s)
        finally:
            os.close(file)


def _variables(pid: int) -> set[bytes]:
    """Return a process's variables as it was started; none for one that ended or is not ours."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin:
        process.stdin.close()

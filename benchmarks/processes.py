"""Processes of a benchmarked job: started with a log, found again by their run folder, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.jobplan import RUN_DIR_VARIABLE

END_S = 10.0


def find_processes(run_dir: str) -> list[int]:
    """Find what belongs to a run: by its environment, or by its working directory."""
    mark = f"{RUN_DIR_VARIABLE}={run_dir}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            is_marked = mark in (entry / "environ").read_bytes() + b"\0"
            if is_marked or str((entry / "cwd").readlink()) == run_dir:
                found.append(int(entry.name))
    return found


def read_state(pid: int) -> str:
    """Return the letter of a process's state, or nothing for one that is gone."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    return read_state(pid) == "T"


def end_processes(run_dir: str) -> None:
    """Kill what belongs to a run until nothing of it is left; zombies do not count."""
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        alive = [pid for pid in find_processes(run_dir) if read_state(pid) not in {"", "Z", "X"}]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@dataclasses.dataclass(slots=True, kw_only=True)
class Command:
    """One process to start; with `restarts`, again at once whenever it ends with an error.

    A process with `serves` does not keep the job alive.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    restarts: bool = False
    serves: bool = False


class ProcessJob:
    """A job made of processes that this one starts, in their run folder and with one log."""

    def __init__(self, run_dir: str, commands: Sequence[Command]) -> None:
        self.run_dir = run_dir
        self.running = [(command, self._start(command)) for command in commands]

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        with Path(self.run_dir, "log").open("ab") as log:
            return subprocess.Popen(
                list(command.arguments),
                env=dict(command.environment),
                cwd=self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Start again what has to be, and return whether anything but servers runs."""
        alive = False
        for index, (command, process) in enumerate(self.running):
            if process.poll() not in {None, 0} and command.restarts:
                self.running[index] = (command, self._start(command))
                alive = True
            elif process.returncode is None and not command.serves:
                alive = True
        return alive

    def end(self) -> None:
        """Kill every process of the run, known or not."""
        end_processes(self.run_dir)
        for _, process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

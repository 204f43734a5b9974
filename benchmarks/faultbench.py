"""The frame of the fault benchmarks: start a job, watch its events, end it without a trace.

A system is anything that can train the job of `recovery_peers/job.py` through faults. What a
run's events mean is in figures.py; nothing here knows a particular system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from benchmarks import figures
from benchmarks.events import Event, EventLog, EventReader
from benchmarks.faults import open_window
from benchmarks.jobplan import RUN_DIR_VARIABLE, Fault, JobPlan, Place
from benchmarks.processes import ProcessJob, end_processes, is_stopped

FOLDER = Path("/dev/shm")
PREFIX = "faultbench-"
WATCH_S = 0.25
POLL_S = 0.01
LEAVE_S = 5.0
WARM_STEP = 3
_numbers = itertools.count()


class RunningJob(Protocol):
    """A started job. The frame polls it often and ends it once, whatever happened."""

    def poll(self) -> bool:
        """Return whether it still runs, and do what an outer supervisor has to do.

        Called about a hundred times a second; never blocks.
        """

    def end(self) -> None:
        """End every process of the job at once, and wait for them; may be called twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system under test.

    `start` gets a written plan whose run folder exists, and returns without waiting. All its
    processes must carry FAULTBENCH_RUN_DIR in their environment or have the run folder as
    working directory: this is how the frame finds what is left of them. `missing` says why it
    cannot run here, or None.
    """

    name: str
    what: str
    start: Callable[[JobPlan], RunningJob]
    missing: Callable[[], str | None]
    gloo_timeout_s: float = 10.0
    checkpoint_every: int = 1
    replaces_ranks: bool = True
    handles_stop: bool = True
    places: tuple[Place, ...] = ("backward",)
    fault_spacing: int = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a run is given up: seconds without a committed step, and before a rescue.

    A stopped process is killed from outside after `rescue_s`; None leaves it alone.
    """

    stall_s: float = 60.0
    rescue_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is left of one run. `end` is finished, window over, stalled or died."""

    end: str
    events: tuple[Event, ...]
    began_s: float | None
    words: str


def free_ports(number: int) -> tuple[int, ...]:
    """Find free ports of 127.0.0.1; all are held while the next is sought."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(number):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    return tuple(ports)


@contextlib.contextmanager
def run_folder(keep: Path | None = None) -> Iterator[str]:
    """Lend a folder in memory; afterwards no process and no file of the run is left.

    What a killed benchmark left behind is removed first. `keep` gets a copy of logs and events.
    """
    sweep()
    path = FOLDER / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    path.mkdir()
    try:
        yield str(path)
    finally:
        end_processes(str(path))
        if keep is not None:
            shutil.copytree(
                path,
                keep / path.name,
                ignore=shutil.ignore_patterns("checkpoint*", "tmp"),
                dirs_exist_ok=True,
            )
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> None:
    """Remove processes and folders of benchmarks that were killed themselves."""
    for path in FOLDER.glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            end_processes(str(path))
            shutil.rmtree(path, ignore_errors=True)


class Watch:
    """Looks at a run's events now and then, and says when the run is over."""

    def __init__(self, plan: JobPlan, limits: Limits, window_s: float | None) -> None:
        self.plan = plan
        self.limits = limits
        self.window_s = window_s
        self.reader = EventReader(plan.run_dir)
        self.log = EventLog(plan.run_dir)
        self.began_s: float | None = None
        self.committed_s = self.heard_s = time.monotonic()

    def look(self) -> str | None:
        """Read what is new; return how the run ended, or None while it goes on."""
        now_s = time.monotonic()
        fresh = self.reader.read_new()
        if fresh:
            self.heard_s = now_s
        if any(event.word == "committed" for event in fresh):
            self.committed_s = now_s
        if self.window_s is not None and self.began_s is None:
            self._open_window(now_s)
        self._rescue(now_s)
        if self.began_s is not None and self.window_s is not None:
            if now_s >= self.began_s + self.window_s:
                return "window over"
        elif self._is_finished(now_s):
            return "finished"
        return "stalled" if now_s - self.committed_s > self.limits.stall_s else None

    def _open_window(self, now_s: float) -> None:
        steps = figures.last_steps(self.reader.events)
        if len(steps) == self.plan.num_ranks and min(steps.values()) >= WARM_STEP:
            self.began_s = now_s
            open_window(self.plan.run_dir, now_s)

    def _is_finished(self, now_s: float) -> bool:
        finished = any(event.word == "finished" for event in self.reader.events)
        return finished and now_s - self.heard_s > LEAVE_S

    def _rescue(self, now_s: float) -> None:
        if self.limits.rescue_s is None:
            return
        events = self.reader.events
        stops = [e for e in events if e.word == "faulted" and e.values["kind"] == "stop"]
        rescued = {event.values["victim"] for event in events if event.word == "rescued"}
        for stop in stops:
            late = now_s - stop.at_s > self.limits.rescue_s
            if late and stop.pid not in rescued and is_stopped(stop.pid):
                self.log.write("rescued", stop.rank, victim=stop.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stop.pid, signal.SIGKILL)


def run_job(
    system: System,
    plan: JobPlan,
    limits: Limits,
    *,
    window_s: float | None = None,
) -> Run:
    """Run one job to its planned step, to the end of its window, or until it is given up.

    With `window_s` the window opens once all ranks are warm, and faults are due in it.
    """
    plan.write()
    watch = Watch(plan, limits, window_s)
    end = None
    job = system.start(plan)
    try:
        looked_s = 0.0
        while end is None:
            alive = job.poll()
            if not alive or time.monotonic() - looked_s >= WATCH_S:
                looked_s = time.monotonic()
                end = watch.look()
                if end is None and not alive:
                    end = "finished" if figures.digests(watch.reader.events) else "died"
            time.sleep(POLL_S)
    finally:
        job.end()
        end_processes(plan.run_dir)
    watch.reader.read_new()
    return Run(
        end=end,
        events=tuple(watch.reader.events),
        began_s=watch.began_s,
        words="" if end in {"finished", "window over"} else tail(Path(plan.run_dir, "log")),
    )


def wait_for_job(
    job: ProcessJob,
    limit_s: float,
    *,
    look: Callable[[], None] = lambda: None,
    every_s: float = POLL_S,
) -> None:
    """Wait for a job's end and look at it meanwhile; raises RuntimeError where it failed."""
    until_s = time.monotonic() + limit_s
    words = ""
    try:
        next_s = time.monotonic()
        while job.poll():
            look()
            if time.monotonic() > until_s:
                words = f"not through after {limit_s:.0f} s"
                break
            next_s = max(next_s + every_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
    finally:
        job.end()
    status = job.running[0][1].returncode
    if words or status:
        words = words or f"ended with status {status}"
        raise RuntimeError(f"the job {words}: {tail(Path(job.run_dir, 'log'))}")


def tail(path: Path) -> str:
    """Return the last line of a log that names an error, or its last line."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    telling = [line for line in lines if "Error" in line and "File " not in line]
    return (telling or lines or [""])[-1].strip()[-300:]


def make_plan(
    system: System, run_dir: str, *, num_steps: int, faults: tuple[Fault, ...]
) -> JobPlan:
    """Make the plan of a run with what the system wants."""
    return JobPlan(
        run_dir=run_dir,
        num_steps=num_steps,
        faults=faults,
        gloo_timeout_s=system.gloo_timeout_s,
        checkpoint_every=system.checkpoint_every,
        ports=free_ports(4),
    )


def job_environment(plan: JobPlan) -> dict[str, str]:
    """Return the environment that all processes of a job get, whatever the system."""
    return {
        **os.environ,
        RUN_DIR_VARIABLE: plan.run_dir,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }

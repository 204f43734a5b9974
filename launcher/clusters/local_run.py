"""One run on this machine: start its nodes, watch them, say how it went.

The launcher sleeps until a node ends, a signal comes, or it is time to draw.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from launcher.clusters.local import num_peer_ports
from launcher.clusters.local_files import log_path, node_name
from launcher.clusters.local_nodes import LocalNodes
from launcher.clusters.ports import hold_port, hold_ports
from launcher.errors import LauncherError, OutsideError
from launcher.job import Job
from launcher.job.fields import time_limit_seconds
from launcher.monitor.console import RunConsole
from launcher.monitor.runstate import LAUNCHER_NODE
from launcher.report import summary_text, write_report
from launcher.rundir import EVENTS_FILE
from resilience.events import EventLog, EventLogError

GRACE_S = 15.0
"""How long a node may take to end after SIGTERM."""
TIME_LIMIT_STATUS = 124
KILLED_STATUS_MIN = 128
"""A node that was killed ends with this and the signal's number."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: what the launcher exits with, and why."""

    exit_status: int
    reason: str
    failed_node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What the launcher woke up for."""

    ended: Mapping[str, int]
    """Exit status by the name of a node that ended."""
    signals: tuple[int, ...] = ()
    is_late: bool = False


def decide_outcome(happened: Happened, job: Job, lost: Collection[str] = ()) -> Outcome | None:
    """Say whether the whole run has to end because of what happened, and with what status.

    `lost` are the nodes that were killed before. A run with nodes that stand by
    goes on as long as no more were killed than stood by.
    """
    for number in happened.signals:
        return Outcome(128 + number, f"stopped by {signal.Signals(number).name}")
    killed = killed_nodes(happened.ended)
    is_bearable = len({*lost, *killed}) <= job.resilience.standby_nodes
    for name, status in sorted(happened.ended.items()):
        if status and not (is_bearable and name in killed):
            return Outcome(status, f"{name} ended with exit status {status}", name)
    if happened.is_late:
        return Outcome(TIME_LIMIT_STATUS, f"time limit {job.time_limit} reached")
    return None


def killed_nodes(ended: Mapping[str, int]) -> set[str]:
    """Return the nodes whose exit status says that they were killed."""
    return {name for name, status in ended.items() if status >= KILLED_STATUS_MIN}


def run_nodes(
    job: Job, run_dir: Path, console: Console | None = None, grace_s: float = GRACE_S
) -> int:
    """Run the scripts in `run_dir` to their end and return the run's exit status.

    Blocks; call it from the main thread. It writes events, logs and the report
    into `run_dir` and shows progress on the console. 0 means that every node
    succeeded, but for those that were killed and others stood in for; 124 that
    the time limit was reached; 128 and a signal's number that the launcher was
    asked to end; else it is that of the first node that failed. No process of
    the run is left when it returns, nor when the launcher is killed. Raises
    OutsideError where the nodes cannot be started.
    """
    if sys.platform != "linux":
        raise OutsideError("action 'run' needs Linux; render for a cluster instead")
    names = [node_name(index) for index in range(job.num_nodes_started)]
    with (
        EventLog(run_dir / EVENTS_FILE, node=LAUNCHER_NODE, rank=None, generation=0) as events,
        ExitStack() as stack,
    ):
        logs = {name: log_path(run_dir, name) for name in names}
        shown = stack.enter_context(RunConsole(job, run_dir / EVENTS_FILE, logs, console))
        _write_started(events, job)
        outcome = Outcome(1, "the launcher failed")
        try:
            outcome = _watch(job, LocalNodes(run_dir, names, grace_s=grace_s), shown)
        finally:
            _write_finished(events, outcome, shown)
        if outcome.exit_status == 0 and not (run_dir / EVENTS_FILE).exists():
            outcome = Outcome(1, f"the run's folder {run_dir} was removed while it ran")
            shown.say(outcome.reason)
        shown.finish(outcome.failed_node)
        shown.say(summary_text(shown.state, _write_report(run_dir, shown)))
    return outcome.exit_status


def _write_started(events: EventLog, job: Job) -> None:
    try:
        events.write(
            "run_started",
            recipe=job.recipe.name,
            version=job.recipe.version,
            digest=job.digest(),
            num_nodes=job.trainer.num_nodes,
            num_devices=job.trainer.num_devices,
        )
    except EventLogError as error:
        raise OutsideError(str(error)) from error


def _write_finished(events: EventLog, outcome: Outcome, shown: RunConsole) -> None:
    try:
        events.write("run_finished", exit_status=outcome.exit_status, reason=outcome.reason)
    except EventLogError as error:
        # What the run came to stays what it is where the disk is full.
        shown.say(str(error))


def _write_report(run_dir: Path, shown: RunConsole) -> Path | None:
    try:
        return write_report(run_dir)
    except LauncherError as error:
        # What the run came to does not depend on its picture.
        shown.say(f"no report: {error}")
        return None


def _watch(job: Job, nodes: LocalNodes, shown: RunConsole) -> Outcome:
    with (
        Signals(_SIGNALS) as signals,
        selectors.DefaultSelector() as selector,
        hold_port() as port,
        hold_ports(num_peer_ports(job)) as peer_ports,
        nodes,
    ):
        selector.register(signals, selectors.EVENT_READ)
        nodes.start(f"127.0.0.1:{port}", selector, peer_ports)
        return _Watch(job, nodes, signals, selector, shown).run()


class _Watch:
    """The loop that waits for nodes, signals and deadlines."""

    def __init__(
        self,
        job: Job,
        nodes: LocalNodes,
        signals: Signals,
        selector: selectors.BaseSelector,
        shown: RunConsole,
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._signals = signals
        self._selector = selector
        self._shown = shown
        self._outcome: Outcome | None = None
        self._lost: set[str] = set()
        limit = job.time_limit
        self._deadline = time.monotonic() + time_limit_seconds(limit) if limit else float("inf")

    def run(self) -> Outcome:
        """Return how the run ended, once no node runs or none can be waited for any more."""
        while self._nodes.num_running:
            happened = self._wait()
            self._shown.refresh()
            if self._outcome is None:
                self._outcome = decide_outcome(happened, self._job, self._lost)
                if self._outcome:
                    self._stop(self._outcome)
                else:
                    self._note_lost(killed_nodes(happened.ended))
            elif happened.signals:
                self._nodes.kill()
            elif happened.is_late:
                break
        if self._outcome:
            return self._outcome
        if self._lost:
            names = ", ".join(sorted(self._lost))
            return Outcome(0, f"all nodes succeeded but {names}, for which others stood in")
        return Outcome(0, "all nodes succeeded")

    def _note_lost(self, names: set[str]) -> None:
        for name in sorted(names):
            self._lost.add(name)
            self._shown.say(f"{name} was killed; the run goes on with {self._nodes.num_running}")

    def _stop(self, outcome: Outcome) -> None:
        self._shown.say(f"{outcome.reason}; ending the run")
        self._nodes.stop()
        # A keeper ends by itself before this; leaving the block deals with one that does not.
        self._deadline = time.monotonic() + self._nodes.grace_s + 5.0

    def _wait(self) -> Happened:
        seconds_left = self._deadline - time.monotonic()
        ready = self._selector.select(max(0.0, min(self._shown.refresh_s, seconds_left)))
        names = [key.data for key, _ in ready if key.data is not None]
        return Happened(
            ended={name: self._nodes.collect(name, self._selector) for name in names},
            signals=self._signals.read(),
            is_late=time.monotonic() >= self._deadline,
        )


class Signals:
    """Takes signals as data to wait for, while the block runs; main thread only."""

    def __init__(self, numbers: tuple[signal.Signals, ...]) -> None:
        self._numbers = numbers
        self._stack = ExitStack()

    def __enter__(self) -> Signals:
        self._ours, theirs = socket.socketpair()
        self._stack.enter_context(self._ours)
        self._stack.enter_context(theirs)
        self._ours.settimeout(0.0)
        theirs.settimeout(0.0)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)
        for number in self._numbers:
            self._stack.callback(signal.signal, number, signal.signal(number, _note))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fileno(self) -> int:
        """Return what becomes readable when a signal came."""
        return self._ours.fileno()

    def read(self) -> tuple[int, ...]:
        """Return the signals that came since the last call, oldest first."""
        try:
            return tuple(number for number in self._ours.recv(64) if number in self._numbers)
        except BlockingIOError:
            return ()


def _note(number: int, frame: object) -> None:
    """Do nothing: the wakeup descriptor has the number already."""

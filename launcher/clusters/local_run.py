"""One run on this machine: start its nodes, watch them, say how it went.

The launcher sleeps until a node ends, a signal comes, or it is time to draw.
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.clusters.local import endpoints, num_peer_ports
from launcher.clusters.local_files import log_path, node_name
from launcher.clusters.local_nodes import LocalNodes
from launcher.clusters.ports import hold_ports
from launcher.clusters.running.folder_logs import newest_generation
from launcher.clusters.running.lock import held_lock, is_other_run
from launcher.clusters.running.memory import remove_arenas
from launcher.clusters.running.requests import forget_size, read_size
from launcher.errors import LauncherError, OutsideError
from launcher.job import Job
from launcher.job.fields import time_limit_seconds
from launcher.job.grace import workers_grace_s
from launcher.monitor.console import RunConsole
from launcher.monitor.runstate import LAUNCHER_NODE
from launcher.monitor.standing import STOPPED_BY
from launcher.report import read_report, summary_text, write_page
from launcher.report.account import Account, account_of
from launcher.rundir import EVENTS_FILE, find_write_problem
from resilience.events import EventLog, EventLogError
from resilience.node_config import UNSTORED_STATUS
from resilience.signals import STOP_SIGNALS, caught_signals, read_signals

GRACE_S = 25.0
"""How long a node may take to end after SIGTERM.

Where the run recovers its agent gives workers 15 s, waits for what SIGKILL ends, and says so.
"""
_AGENT_END_S = 10.0
TIME_LIMIT_STATUS = 124
KILLED_STATUS_MIN = 128
"""A node that was killed ends with this and the signal's number."""
LEFT_STATUS = KILLED_STATUS_MIN + signal.SIGTERM
"""That of a node that was asked to leave."""
_SIGKILL_STATUS = KILLED_STATUS_MIN + signal.SIGKILL
SCALE_SIGNAL = signal.SIGUSR1
"""Somebody has written how many nodes the run is to have."""


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
    is_scaled: bool = False
    """Whether somebody has asked for another number of nodes."""
    is_late: bool = False


def decide_outcome(
    happened: Happened,
    job: Job,
    lost: Collection[str] = (),
    *,
    num_started: int | None = None,
    leaving: Collection[str] = (),
    further: Collection[str] = (),
    asked: Collection[str] = (),
) -> Outcome | None:
    """Return how the whole run ends because of what happened, None where it goes on.

    `lost` are the nodes that were killed before, of `num_started`; without a number, of
    those that a run starts with. A run goes on as long as no more were killed than stood
    by, or than it can do without. Of those that are `leaving` no end counts, and one of the
    `further` nodes, which were started later, that fails is lost as if it were killed. `asked` are
    those that are there, or have just ended, and were asked to leave, by whomever.
    """
    for number in happened.signals:
        return Outcome(128 + number, f"{STOPPED_BY}{signal.Signals(number).name}")
    killed = killed_nodes(happened.ended) | failed_nodes(happened.ended, further)
    elastic = job.resilience.elastic
    num_needed = elastic.nodes_min if elastic else job.trainer.num_nodes
    num_started = job.num_nodes_started if num_started is None else num_started
    is_bearable = num_started - len({*lost, *killed}) >= num_needed
    for name, status in sorted(happened.ended.items()):
        if name in leaving:
            continue
        # A node whose store lacks something says so of a run that has ended well.
        if status not in (0, UNSTORED_STATUS) and not (is_bearable and name in killed):
            if status == LEFT_STATUS:
                num_staying = num_started - len({*lost, *asked} - {*leaving})
                if elastic and asked and num_staying < num_needed:
                    return Outcome(status, _too_many_text(asked, elastic.nodes_min))
                return Outcome(status, f"{STOPPED_BY}SIGTERM on {name}", name)
            return Outcome(status, f"{name} ended with exit status {status}", name)
    if happened.is_late:
        return Outcome(TIME_LIMIT_STATUS, f"time limit {job.time_limit} reached")
    return None


def _too_many_text(asked: Collection[str], nodes_min: int) -> str:
    return (
        f"{STOPPED_BY}too many requests to leave: to {', '.join(sorted(asked))}; fewer than "
        f"resilience.elastic.nodes_min={nodes_min} would have stayed"
    )


def killed_nodes(ended: Mapping[str, int]) -> set[str]:
    """Return the nodes whose exit status says that they were killed."""
    return {name for name, status in ended.items() if status >= KILLED_STATUS_MIN}


def nodes_to_restart(
    ended: Mapping[str, int], job: Job, num_restarts: int, *, has_dead_worker: bool
) -> set[str]:
    """Return the nodes that SIGKILL has ended and that are started again, as the job says.

    An agent ends by itself with the same status where a worker was killed for the last time.
    """
    has_recovery = job.resilience.checkpointless or job.resilience.elastic
    if has_recovery or has_dead_worker or num_restarts >= job.trainer.max_restarts:
        return set()
    return {name for name, status in ended.items() if status == _SIGKILL_STATUS}


def ended_text(status: int) -> str:
    """Return how a node without which the run goes on has ended, as what it did."""
    if status == LEFT_STATUS:
        return "has left"
    if status >= KILLED_STATUS_MIN:
        return "was killed"
    return f"ended with exit status {status}"


def failed_nodes(ended: Mapping[str, int], names: Collection[str]) -> set[str]:
    """Return which of these nodes have ended in another way than well."""
    return {name for name in names if ended.get(name, 0) not in (0, UNSTORED_STATUS)}


def plan_nodes(
    all_names: Sequence[str],
    running: Sequence[str],
    leaving: Collection[str],
    wanted: int,
    training: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Return which nodes are to be started, and which are to be asked to leave.

    `running` are in the order in which they were started. Those go first that are not `training`,
    then those that came last. One that is leaving counts no more, and is started again only when it
    has gone.
    """
    staying = [name for name in running if name not in leaving]
    staying.sort(key=lambda name: name not in training)
    absent = [name for name in all_names if name not in running]
    return absent[: max(0, wanted - len(staying))], staying[wanted:]


def node_grace_s(job: Job) -> float:
    """Return how long a node may take to end after SIGTERM, its workers' deadline among it."""
    return max(GRACE_S, (workers_grace_s(job) or 0.0) + _AGENT_END_S)


def run_nodes(
    job: Job,
    run_dir: Path,
    console: Console | None = None,
    grace_s: float | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> int:
    """Run the scripts in `run_dir` to their end and return the run's exit status.

    Blocks; call it from the main thread. It writes events, logs and the report
    into `run_dir`, holds the run's lock and shows progress on the console. `on_started` is called
    once when all nodes have been started. 0 means that every node
    succeeded, but for those that were killed and others stood in for; 124 that
    the time limit was reached; 74 that the store has not got what it was to get;
    128 and a signal's number that the launcher was asked to end; else it is that
    of the first node that failed. No process of the run is left when it returns,
    nor when the launcher is killed. Raises OutsideError where the nodes cannot be
    started.
    """
    if sys.platform != "linux":
        raise OutsideError("action 'run' needs Linux; render for a cluster instead")
    # Whoever asks for another size before or after the run is at work ends nothing.
    signal.signal(SCALE_SIGNAL, lambda number, frame: None)
    names = [node_name(index) for index in range(job.num_nodes_started)]
    nodes = LocalNodes(run_dir, names, grace_s=node_grace_s(job) if grace_s is None else grace_s)
    log = run_dir / EVENTS_FILE
    with (
        # From here on a signal ends the run in order, and its end is on record.
        caught_signals(*STOP_SIGNALS, SCALE_SIGNAL) as signals,
        held_lock(run_dir, nodes.run_id),
        EventLog(log, node=LAUNCHER_NODE, rank=None, generation=newest_generation(log)) as events,
        ExitStack() as stack,
    ):
        forget_size(run_dir)
        logs = {name: log_path(run_dir, name) for name in names}
        shown = stack.enter_context(RunConsole(job, log, logs, console))
        _write_started(events, job)
        outcome = Outcome(1, "the launcher failed")
        try:
            outcome = _watch(job, nodes, signals, shown, events, on_started)
            is_other = is_other_run(run_dir, nodes.run_id)
            if is_other or not log.exists():
                what = f"the run's folder {run_dir} was removed, renamed or replaced while it ran"
                outcome = Outcome(1, what)
                shown.say(what)
        finally:
            _write_event(
                events,
                shown,
                "run_finished",
                exit_status=outcome.exit_status,
                reason=outcome.reason,
            )
        if outcome.exit_status == 0:
            # A node that had left, or was killed, keeps its own for a start that may follow.
            remove_arenas(run_dir)
        shown.finish(outcome.failed_node)
        found = (None, None) if is_other else _write_report(run_dir, shown)
        shown.say(summary_text(shown.state, *found))
    return outcome.exit_status


def _write_started(events: EventLog, job: Job) -> None:
    try:
        events.write(
            "run_started",
            recipe=job.recipe.name,
            version=job.recipe.version,
            digest=job.digest(),
            num_nodes=job.trainer.num_nodes,
            num_devices=job.trainer.workers_per_node,
        )
    except EventLogError as error:
        raise OutsideError(str(error)) from error


def _write_event(events: EventLog, shown: RunConsole, event: str, **fields: Any) -> None:
    shown.read_events()
    events.enter(max(events.generation, shown.generation))
    try:
        events.write(event, **fields)
    except EventLogError as error:
        # What the run came to stays what it is where the disk is full.
        shown.say(str(error))


def _write_report(run_dir: Path, shown: RunConsole) -> tuple[Path | None, Account | None]:
    account = None
    try:
        report = read_report(run_dir)
        account = account_of(report.record)
        return write_page(run_dir, report), account
    except LauncherError as error:
        # What the run came to does not depend on its picture.
        shown.say(f"no report: {error}")
        return None, account


def _watch(
    job: Job,
    nodes: LocalNodes,
    signals: int,
    shown: RunConsole,
    events: EventLog,
    on_started: Callable[[], None],
) -> Outcome:
    with (
        selectors.DefaultSelector() as selector,
        hold_ports(job.num_nodes_max) as ports,
        hold_ports(num_peer_ports(job)) as peer_ports,
        nodes,
    ):
        selector.register(signals, selectors.EVENT_READ)
        nodes.start(endpoints(ports), selector, peer_ports)
        on_started()
        return _Watch(job, nodes, signals, selector, shown, events).run()


@dataclass(slots=True)
class _Watch:
    """The loop that waits for nodes, signals and deadlines."""

    job: Job
    nodes: LocalNodes
    signals: int
    selector: selectors.BaseSelector
    shown: RunConsole
    events: EventLog
    lost: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    """Those of them that others than the launcher have asked to leave."""
    leaving: set[str] = field(default_factory=set)
    """Nodes that were asked to leave the run."""
    num_started: int = 0
    """Nodes that were started and not asked to leave."""
    further: set[str] = field(default_factory=set)
    """Nodes that were started while the run was at work."""
    is_scaled: bool = False
    """Whether somebody has asked for a number of nodes."""
    unstored: set[str] = field(default_factory=set)
    num_restarts: int = 0
    """Number of times that killed nodes were started again."""
    deadline_s: float = float("inf")
    is_asked: bool = False
    """Somebody has asked for the run's end, which may have begun by itself before."""

    def run(self) -> Outcome:
        """Return how the run ended, once no node runs or none can be waited for any more."""
        outcome: Outcome | None = None
        self.num_started = len(self.nodes.running)
        if limit := self.job.time_limit:
            self.deadline_s = time.monotonic() + time_limit_seconds(limit)
        while self.nodes.running:
            happened = self._wait()
            self.shown.refresh()
            if outcome is None:
                again = self._nodes_to_restart(happened)
                outcome = decide_outcome(
                    happened,
                    self.job,
                    self.lost,
                    num_started=self.num_started,
                    leaving=self.leaving | again,
                    further=self.further,
                    asked=self.leaving | self.left | self.shown.state.nodes_to_leave - self.lost,
                )
                if outcome:
                    outcome = self._explain(outcome)
                    self._stop(outcome)
                else:
                    lost = killed_nodes(happened.ended) | failed_nodes(happened.ended, self.further)
                    self._note_lost(lost - self.leaving - again, happened.ended)
                    self._restart(again, happened.ended)
                    ended = happened.ended.items()
                    unstored = {name for name, status in ended if status == UNSTORED_STATUS}
                    self.unstored |= unstored - self.leaving
                    self.is_scaled = self.is_scaled or happened.is_scaled
                    # Who was leaving may be wanted again by now.
                    is_due = happened.is_scaled or bool(self.leaving & happened.ended.keys())
                    self.leaving -= happened.ended.keys()
                    if is_due and self.is_scaled:
                        self._scale()
            elif happened.signals and self.is_asked:
                self.nodes.kill()
            elif happened.signals:
                self.shown.say("the run is ending already; one more request kills its nodes")
            elif happened.is_late:
                break
            self.is_asked = self.is_asked or bool(happened.signals)
        if self.unstored and not outcome:
            names = ", ".join(sorted(self.unstored))
            reason = f"the run has finished, but not all of it is in the store (told by {names})"
            return Outcome(UNSTORED_STATUS, reason)
        if self.lost and not outcome:
            names = ", ".join(sorted(self.lost))
            return Outcome(0, f"all nodes succeeded but {names}, without which the run went on")
        if outcome:
            self.shown.read_events()
            unkept = f"; {self.shown.state.unkept}" if self.shown.state.unkept else ""
            return replace(outcome, reason=outcome.reason + unkept)
        return Outcome(0, "all nodes succeeded")

    def _explain(self, outcome: Outcome) -> Outcome:
        """Name a folder that is full, whichever rank saw that: others see only what it led to."""
        is_there = self.nodes.run_dir.exists()
        problem = find_write_problem(self.nodes.run_dir) if is_there else None
        if outcome.failed_node is None or not problem:
            return outcome
        reason = f"{outcome.reason}, and run.dir {self.nodes.run_dir} takes nothing more: {problem}"
        return replace(outcome, reason=f"{reason}; make room there, or choose another run.dir")

    def _note_lost(self, names: set[str], ended: Mapping[str, int]) -> None:
        for name in sorted(names):
            self.lost.add(name)
            text = ended_text(ended[name])
            if ended[name] == LEFT_STATUS:
                self.left.add(name)
                self.shown.say(f"{name} {text}")
            else:
                self.shown.say(f"{name} {text}; the run goes on with {len(self.nodes.running)}")
            # Whoever could tell the others may be among those that are lost.
            _write_event(self.events, self.shown, "node_gone", node=name, text=text)

    def _nodes_to_restart(self, happened: Happened) -> set[str]:
        if happened.ended:
            self.shown.read_events()
        has_dead_worker = self.shown.state.death is not None
        return nodes_to_restart(
            happened.ended, self.job, self.num_restarts, has_dead_worker=has_dead_worker
        )

    def _restart(self, names: set[str], ended: Mapping[str, int]) -> None:
        """Start killed nodes again, which is one of the restarts that the job allows."""
        self.num_restarts += bool(names)
        for name in sorted(names):
            self.shown.say(f"{name} {ended_text(ended[name])}, and is started again")
            self.nodes.add(name, self.selector)

    def _scale(self) -> None:
        """Start further nodes, or ask some to leave, as somebody has asked for."""
        if (size := read_size(self.nodes.run_dir)) is None:
            return
        wanted = self.job.num_nodes_at(size)
        # Whoever was asked to leave by others, and has not left yet, is not what is wanted now.
        others = (self.shown.state.nodes_to_leave & set(self.nodes.running)) - self.leaving
        self.num_started -= len(others)
        self.leaving |= others
        all_names = [node_name(index) for index in range(self.job.num_nodes_max)]
        training = self.shown.state.training_nodes
        coming, going = plan_nodes(all_names, self.nodes.running, self.leaving, wanted, training)
        for name in coming:
            try:
                self.nodes.add(name, self.selector)
            except OutsideError as error:
                self.shown.say(str(error))
                return
            self.num_started += name not in self.lost
            self.lost.discard(name)
            self.left.discard(name)
            self.further.add(name)
            self.shown.add_node(name, log_path(self.nodes.run_dir, name))
            self.shown.say(f"{name} has been started")
        for name in going:
            self.leaving.add(name)
            self.num_started -= 1
            self.nodes.stop_node(name)
            self.shown.say(f"{name} is asked to leave the run")

    def _stop(self, outcome: Outcome) -> None:
        self.shown.say(f"{outcome.reason}; ending the run")
        self.nodes.stop()
        # A keeper ends by itself before this; leaving the block deals with one that does not.
        self.deadline_s = time.monotonic() + self.nodes.grace_s + 5.0

    def _wait(self) -> Happened:
        seconds_left = self.deadline_s - time.monotonic()
        ready = self.selector.select(max(0.0, min(self.shown.refresh_s, seconds_left)))
        names = [key.data for key, _ in ready if key.data is not None]
        numbers = read_signals(self.signals)
        return Happened(
            ended={name: self.nodes.collect(name, self.selector) for name in names},
            signals=tuple(number for number in numbers if number in STOP_SIGNALS),
            is_scaled=SCALE_SIGNAL in numbers,
            is_late=time.monotonic() >= self.deadline_s,
        )

"""What a run on this machine shows: progress from its events, and its failures.

Reads the run's event log and the nodes' logs; decides nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.job import Job
from launcher.monitor.logs import LogReader, failure_lines, is_warning, plain, read_tail, worker_log
from launcher.monitor.phases import FAILED
from launcher.monitor.progress import open_display
from launcher.monitor.runstate import LAUNCHER_NODE, next_state, start_state
from launcher.monitor.storage import lost_step
from launcher.rundir import is_full
from launcher.terminal import drawing
from resilience.events import Event, EventReader


class RunConsole:
    """Follows one run; use as a context around the time in which it runs."""

    def __init__(
        self, job: Job, events: Path, logs: Mapping[str, Path], console: Console | None
    ) -> None:
        self.state = start_state(job, tuple(logs))
        self.generation = 0
        """The newest of which there are events."""
        self._console = console or Console(highlight=False, file=drawing(sys.stdout))
        self._display = open_display(self._console)
        self._events = EventReader(events, keeps_open=True)
        self._paths = dict(logs)
        self._logs = {name: LogReader(path) for name, path in logs.items()}
        self._folder = events.parent
        self._warnings: set[str] = set()

    @property
    def refresh_s(self) -> float:
        """Return how long the display may stay as it is."""
        return self._display.refresh_s

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *error: object) -> None:
        self._display.close()
        self._events.close()

    def add_node(self, name: str, log: Path) -> None:
        """Show a further node, which has just been started."""
        if name not in self._paths:
            self._paths[name], self._logs[name] = log, LogReader(log)
            self.state = replace(self.state, nodes=(*self.state.nodes, name))

    def say(self, text: str) -> None:
        """Print text as it is: nothing in it is markup, or a command to the terminal."""
        for line in text.splitlines():
            self._console.print(Text(plain(line)), soft_wrap=True)

    def refresh(self) -> None:
        """Read what is new and show it."""
        self._read_logs()
        self.read_events()
        if is_full(self._folder):
            what = "events and logs wait for room, and are lost where the run ends before"
            self._warn(LAUNCHER_NODE, f"the disk of {self._folder} is full: {what}")
        self._display.show(self.state, time.time())

    def finish(self, failed_node: str | None) -> None:
        """Show the end, and why the run failed where a node did.

        `failed_node` is the node that ended first with a failure.
        """
        self.refresh()
        self._display.close()
        if failed_node:
            self._say_failure(failed_node)

    def read_events(self) -> None:
        """Take in what is new of the log."""
        warnings: list[Event] = []
        for event in self._events.read_new():
            if text := lost_step(self.state.storage, event):
                warnings.append(replace(event, fields={"text": text}))
            self.state = next_state(self.state, event)
            self.generation = max(self.generation, event.generation)
            if event.event in ("warning", "batch_late"):
                warnings.append(event)
            elif event.event == "run_started":
                # What was wrong with starts before this one has been said.
                warnings.clear()
        for text in self._events.foreign:
            self._warn(LAUNCHER_NODE, f"the event log has a line that is no event: {text}")
        for each in warnings:
            self._warn(each.node, str(each.fields.get("text", "")))

    def _read_logs(self) -> None:
        for name, log in self._logs.items():
            for line in log.read_new():
                if is_warning(line):
                    self._warn(name, line)

    def _warn(self, node: str, text: str) -> None:
        # Every worker says the same things; once is enough.
        if text not in self._warnings:
            self._warnings.add(text)
            self.say(f"[{node}] {text}")

    def _say_failure(self, name: str) -> None:
        """Say who died and how, as its agent saw it, and then what the workers said themselves."""
        failure, message, log = self.state.failure, None, self._paths[name]
        if (death := self.state.death) and death[1].node in self._paths:
            event, worker = death
            name, own = worker.node, worker_log(self._paths[worker.node], event)
            where = f"; its log: {own}" if own.exists() else ""
            self.say(f"[{name}] {event.fields.get('text', '')}{where}")
            if not self.state.keeps_state:
                log = own
            if worker.phase != FAILED:
                # What the others failed of follows from it.
                failure = None
        if failure and failure.node in self._paths:
            name, log = failure.node, self._paths[failure.node]
            message = str(failure.fields.get("message", ""))
            self.say(f"[{name}] rank {failure.rank} failed: {message}")
        for line in failure_lines(read_tail(log), message):
            self.say(f"[{name}] {line}")
        self.say(f"[{name}] the whole log: {self._paths[name]}")

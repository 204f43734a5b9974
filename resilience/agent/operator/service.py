"""A node under HyperPod's operator: one process answers it, and each run is a child of its own.

The child is an agent as any other, on a command line with what /start has said. What a run leaves
behind goes to this process, which kills it before it calls the node ready: a run that crashes,
stands still or leaks threads takes nothing along that the next one needs.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from resilience.agent.operator import states
from resilience.agent.operator.commands import BODIES, StopBody, UpdateBody
from resilience.agent.operator.server import open_port
from resilience.agent.operator.starts import refuse_size, start_words
from resilience.agent.processes.tree import read_processes
from resilience.agent.processes.worker import describe_status
from resilience.agent.processes.zygote_process import adopt_orphans
from resilience.comm.page import Activity, Page, create_page
from resilience.runtime.wake import Wake

_LOOK_S = 0.25
"""Seconds between two looks at the steps."""
_AGENT_END_S = 15.0
"""Beyond the time of its workers and its checkpoint daemon, what an agent may take to end."""
_KILL_S = 30.0
"""A process that SIGKILL does not end within it is in the hands of a driver: the node is lost."""


class OperatedNode:
    """Answers the operator, and does what it says. One thread, which waits for no run."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str], num_slots: int) -> None:
        """Listen at the port; raises OSError where it cannot be had."""
        self._options, self._words, self._num_slots = options, words, num_slots
        self._state, self._dates = states.NodeState(), {"INIT": _now()}
        self._run: _Run | None = None
        self._wake, self._is_terminated = Wake(), False
        self._server = open_port(options, self._answer)

    def serve(self) -> int:
        """Answer until the operator, or a signal, ends the agent; returns its exit status.

        Raises OSError where a process cannot be killed.
        """
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: self._note_signal(number))
        poll = select.poll()
        for each in (self._server, self._wake):
            poll.register(each, select.POLLIN)
        self._feed("up")
        while self._state.exit_status is None:
            rest_s = self._server.tick(time.monotonic()) - time.monotonic()
            poll.poll(max(0.0, min(rest_s, _LOOK_S)) * 1000)
            self._wake.clear()
            self._server.take()
            if self._is_terminated:
                self._is_terminated = False
                self._feed("terminated")
            self._look()
        return self._state.exit_status

    def _note_signal(self, number: int) -> None:
        self._is_terminated |= number != signal.SIGCHLD
        self._wake.set()

    def _answer(self, path: str, body: bytes) -> dict[str, Any] | None:
        """Carry out a request; raises ValidationError and RefusalError."""
        if path == "/shutdown":
            self._feed("shutdown")
        elif path != "/status":
            is_empty = path == "/stop" and body in (b"", b"null")
            command = BODIES[path].model_validate_json(b"{}" if is_empty else body)
            if isinstance(command, UpdateBody):
                refuse_size(self._options, command)
            self._feed(command)
        if path not in ("/status", "/update"):
            return None
        return states.describe(
            self._state,
            self._dates,
            num_workers=self._options.workers_per_node,
            folder=str(self._options.run_dir),
            version=metadata.version("training-recipes"),
        )

    def _feed(self, event: states.Event) -> None:
        before, after = self._state, states.decide(self._state, event, time.monotonic())
        self._state = after
        if after.status != before.status:
            _say(f"{before.status} to {after.status} {after.message}")
            # The operator reads them in the order in which the states were entered.
            self._dates.pop(after.status.upper(), None)
            self._dates[after.status.upper()] = _now()
        if after.has_run and not before.has_run:
            self._start()
        elif after.stop and not before.stop and self._run:
            self._run.end(self._limit_s(after.stop))

    def _limit_s(self, stop: StopBody) -> float:
        """Return within how many seconds a run has to end."""
        options = self._options
        own_s = options.grace_s if stop.is_graceful else options.term_deadline_s
        daemon = options.node_config.memoryd
        daemon_s = daemon.end_s(removes=False) if daemon else 0.0
        return stop.timeout or float(own_s) + daemon_s + _AGENT_END_S

    def _start(self) -> None:
        assert self._state.body
        words = start_words(self._words, self._options, self._state.body)
        try:
            self._run = _Run(words, self._num_slots)
        except OSError as error:
            text = f"no process for the run: {error}"
            self._feed(states.RunEnded(status=1, text=text, is_told=False))

    def _look(self) -> None:
        """Take in the end of the run, or its steps."""
        self._feed(states.Stepped(self._run.newest_step() if self._run else -1))
        if self._run and (ended := self._run.check()):
            self._run = None
            self._feed(ended)
            self._feed(states.Stepped(-1))


class _Run:
    """The process of one run's agent, and what it has started."""

    def __init__(self, words: Sequence[str], num_slots: int) -> None:
        """Start it; raises OSError."""
        self._page_file = create_page(num_slots)
        self._page = Page(self._page_file, num_slots)
        self._end_file, end_file = os.pipe2(os.O_NONBLOCK)
        self._kill_s = float("inf")
        link = f"--operator-link={self._page_file},{end_file},{os.getpid()}"
        command = [sys.executable, "-m", "resilience.agent", link, *words]
        with os.fdopen(end_file):
            self._process = subprocess.Popen(command, pass_fds=[self._page_file, end_file])

    def end(self, timeout_s: float) -> None:
        """Ask the run to end, as its agent's own SIGTERM does; it is killed after the time."""
        self._kill_s = time.monotonic() + timeout_s
        self._process.terminate()

    def newest_step(self) -> int:
        """Return the newest step that a worker has shown, -1 for none."""
        slots = map(self._page.read, range(self._page.num_slots))
        steps = (each.step for each in slots if each.activity is not Activity.NOWHERE)
        return max(steps, default=-1)

    def check(self) -> states.RunEnded | None:
        """Kill what is overdue, and return the end of a run of which no process is left.

        Raises TimeoutError where one lives on.
        """
        now_s, status = time.monotonic(), self._process.poll()
        if status is None and now_s < self._kill_s:
            return None
        self._kill_s = min(self._kill_s, now_s)
        if now_s >= self._kill_s + _KILL_S:
            raise TimeoutError("a process of the run outlives SIGKILL; the node is lost")
        # Processes that outlive the agent become children of this one.
        own = os.getpid()
        left = [pid for pid, each in read_processes().items() if each.parent == own]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            if pid != self._process.pid:
                os.waitpid(pid, os.WNOHANG)
        return self._close(status) if not left and status is not None else None

    def _close(self, status: int) -> states.RunEnded:
        with os.fdopen(self._end_file, "rb") as file:
            told = (file.read() or b"").decode(errors="replace")
        self._page.close()
        os.close(self._page_file)
        text = told or f"the agent of the run {describe_status(status)}"
        status = 128 - status if status < 0 else status
        return states.RunEnded(status=status, text=text, is_told=bool(told))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()


def _say(text: str) -> None:
    sys.stderr.write(f"resilience.agent: operator: {text.strip()}\n")

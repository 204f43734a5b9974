"""Ctrl-C while a run on this machine begins."""

from __future__ import annotations

import os
import signal
from io import StringIO
from pathlib import Path

from rich.console import Console

from launcher.clusters.local_run import run_nodes
from resilience.events import read_events
from tests.launcher.local_job import write_run


class InterruptedConsole(Console):
    """A console whose user presses Ctrl-C as soon as it is used."""

    num_presses = 0

    @property
    def is_terminal(self) -> bool:
        if self.num_presses:
            self.num_presses -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return False


def test_interrupt_before_the_first_node_is_the_end_on_record(tmp_path: Path) -> None:
    job = write_run(tmp_path, "sleep 600", "sleep 600")

    console = InterruptedConsole(file=StringIO())
    console.num_presses = 1

    status = run_nodes(job, tmp_path, console, 5.0)

    last = read_events(tmp_path / "events.jsonl")[-1]
    assert (status, last.event) == (130, "run_finished")
    assert last.fields == {"exit_status": 130, "reason": "stopped by SIGINT"}

"""The display of a run that was started elsewhere, on a terminal and without one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from tests.launcher.command import launch
from tests.launcher.local_world import launcher_of, start_run, status_of, tell
from tests.processes import LIMIT_S

# Whoever runs the tests in the background has them ignore SIGINT, and so their children.
ATTACH = """
import signal, sys
from launcher.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["attach", sys.argv[1]]))
"""


def write_step(run: Path, step: int) -> None:
    record = {"time": 1e9, "node": "node-0", "rank": 0, "generation": 0, "step": step}
    for event in ("worker_started", "step"):
        fields = {"event": event, "fields": {"loss": 2.5, "duration_s": 0.5}}
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(record | fields) + "\n")


def test_attached_display_goes_on_until_the_end(team: Path) -> None:
    run = start_run(team)
    write_step(run, 4)
    tell(run, 0)

    attached = launch("attach", run.name, folder=team)

    assert attached.status == 0, attached.err
    assert "llama3-tiny-pretrain has ended: succeeded: all nodes succeeded\n" in attached.out
    assert "  steps       5 of 200\n" in attached.out


def test_ctrl_c_leaves_the_display_and_the_run_goes_on(team: Path) -> None:
    run = start_run(team)
    write_step(run, 4)
    terminal, other = pty.openpty()
    attached = subprocess.Popen(
        [sys.executable, "-c", ATTACH, run.name],
        cwd=team, stdin=other, stdout=other, stderr=other, start_new_session=True,
    )  # fmt: skip
    os.close(other)
    shown = b""
    while b"step 5 of 200" not in shown:
        shown += os.read(terminal, 4096)

    attached.send_signal(signal.SIGINT)

    try:
        assert attached.wait(LIMIT_S) == 0
    finally:
        attached.kill()
        attached.wait()
    while b"goes on; this was its display alone" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert launcher_of(run)
    assert status_of(run).out.startswith("llama3-tiny-pretrain: running\n")

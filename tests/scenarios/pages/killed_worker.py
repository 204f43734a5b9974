"""A page's program whose worker is killed, beside the program without an agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.resilience.agent.runs import Run


def run_with_a_kill(run: Run, text: str) -> Path:
    """Run train.py under torchrun, then under an agent with a kill; return the first's folder.

    The second's is that of `run`.
    """
    alone = run.folder / "alone"
    alone.mkdir()
    for folder in (alone, run.folder):
        (folder / "train.py").write_text(text)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command = [sys.executable, "-m", *torchrun]
    subprocess.run(command, cwd=alone, check=True, timeout=200, capture_output=True)

    program = (str(run.folder / "train.py"),)
    options = ("--nproc-per-node", "2")
    run.start("n0", *options, program=program, warm="imports", variables={"TMPDIR": "/tmp"})
    run.wait_for(lambda event: event.event == "step")
    os.kill(run.children("n0")[2], signal.SIGKILL)

    assert run.wait() == 0, run.show()
    assert "worker_replaced" in {each.event for each in run.events()}
    return alone

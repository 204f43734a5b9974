"""AWS's agent and ours, started on the same worker."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.resilience.agent.runs import PROGRAM, fault, plan
from tests.warm import Process, start

ROOT = Path(__file__).parents[3]
AWS_PYTHON = ROOT / ".venv-aws-agent/bin/python"
WORKER = Path(__file__).with_name("worker.py")
RANKS, STEPS, STEP_S = 2, 12, 0.15
SHUTDOWN_S = "3"
Script = dict[str, Any]
Begin = Callable[[Path, Script, int, int], Process]
"""Starts an agent, by the folder, the script, the number of the node and the port."""


def _environment(folder: Path, script: Script, node: int) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if key != "RANK"},
        "OUT": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT),
        "NODE": str(node), "NNODES": "1", "STEPS": str(STEPS), "STEP_S": str(STEP_S),
        "ORDERS": json.dumps(script.get("workers", [])), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def begin_ours(folder: Path, script: Script, node: int, port: int) -> Process:
    """Start our agent; a script whose workers show steps has a program that recovers."""
    options = ["--no-recovery", "--max-restarts=0", "--preload=json"]
    program, environment = WORKER, _environment(folder, script, node)
    if steps := script.get("steps_of_ours"):
        options, program = ["--preload=torch", "--spares=0"], PROGRAM
        environment |= plan(*(fault("sleep", "forward", rank, steps) for rank in range(RANKS)))
    command = [
        *("resilience.agent", f"--local-addr=127.0.0.{node + 1}", f"--nproc-per-node={RANKS}"),
        *("--operator-port", str(port), "--node-name", f"n{node}"),
        *("--run-dir", str(folder / "run"), "--term-deadline-s", SHUTDOWN_S),
        *(*options, "--", "python", str(program)),
    ]
    with (folder / f"n{node}.txt").open("ab") as output:
        return start(command, folder=folder, environment=environment, output=output)


def begin_aws(
    folder: Path, script: Script, node: int, port: int, more: Sequence[str] = ()
) -> Process:
    """Start AWS's agent; with `more` in the mode whose workers stay at a stop."""
    command = [
        *(str(AWS_PYTHON), str(WORKER.with_name("aws_main.py")), "--nnodes=1"),
        *(f"--nproc-per-node={RANKS}", "--server-host=127.0.0.1", f"--server-port={port}"),
        *("--server-log-level=warning", f"--log-dir={folder}/logs-{node}", "--redirects=3"),
        *(f"--rdzv-conf=resource_config_dir={folder}/places-{node}", "--shutdown-signal=SIGTERM"),
        *(f"--shutdown-timeout={SHUTDOWN_S}", *more, str(WORKER)),
    ]
    # Its socket has to have a short path, wherever the folder is.
    own = {"TMPDIR": "/proc/self/cwd", **({"IN_PROCESS": "1"} if more else {})}
    environment = _environment(folder, script, node) | own
    with (folder / f"n{node}.txt").open("ab") as output:
        return subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)


AGENTS: dict[str, Begin] = {
    "ours": begin_ours,
    "aws": begin_aws,
    "aws in process": partial(begin_aws, more=("--inprocess-restart", "--inprocess-timeout=3")),
}

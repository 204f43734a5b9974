"""A process that has imported torch and forks workers, so that a test need not wait for that.

Requests and answers are JSON lines. It computes nothing itself and has no
threads, which is what makes its children sound.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)


def _run_child(target: str, arguments: list[str], variables: dict[str, str], log: Path) -> int:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(variables)
    module, _, function = target.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(arguments) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # noqa: BLE001 - a child of the server ends here, whatever happened
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _start(request: dict[str, Any], rank: int, variables: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        # A worker that hangs is one that failed.
        signal.alarm(100)
        log = Path(request["folder"]) / f"worker-{rank}.log"
        status = _run_child(request["target"], request["arguments"], variables, log)
    finally:
        os._exit(status)


def _run(request: dict[str, Any]) -> list[int]:
    children = [
        _start(request, rank, variables) for rank, variables in enumerate(request["environments"])
    ]
    statuses = {}
    while len(statuses) < len(children):
        ended, status = os.wait()
        statuses[ended] = os.waitstatus_to_exitcode(status)
    return [statuses[child] for child in children]


def serve() -> None:
    importlib.import_module("training.torch.trainer")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()

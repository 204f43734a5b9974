"""A launcher that goes on by itself, in a session of its own, when the command has returned."""

from __future__ import annotations

import os
import select
import sys
import traceback
from pathlib import Path

from launcher.clusters.local_run import run_nodes
from launcher.errors import LauncherError, OutsideError
from launcher.job import Job
from resilience.plain_files import open_plain

LOG_FILE = "launcher.log"
"""What the launcher would have shown, in the run's logs."""
_START_S = 120.0
"""How long nodes may take to be started: a moment, but for file servers."""
_STARTED = b"started"


def start_detached(job: Job, run_dir: Path) -> None:
    """Start the run in a process of its own; returns once its nodes have been started.

    Raises OutsideError with that process's words where it ends before, or does not get on.
    """
    log = run_dir / "logs" / LOG_FILE
    log.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_in_background(job, run_dir, log, writer)
    os.close(writer)
    try:
        said = _read_answer(reader)
    finally:
        os.close(reader)
    if said is not None and said.startswith(_STARTED):
        return
    if said is None:
        raise OutsideError(
            f"not started within {_START_S:.0f} s; process {child} still tries: see {log}"
        )
    _, status = os.waitpid(child, 0)
    words = said.decode() or f"it ended with status {os.waitstatus_to_exitcode(status)}; see {log}"
    raise OutsideError(f"the run was not started: {words}")


def _read_answer(reader: int) -> bytes | None:
    """Return what the process says of its start; nothing if it has ended, None if it is silent."""
    if not select.select([reader], [], [], _START_S)[0]:
        return None
    return os.read(reader, select.PIPE_BUF)


def _run_in_background(job: Job, run_dir: Path, log: Path, writer: int) -> None:
    """Be the launcher from now on, and end with the run."""
    status = 1
    try:
        os.setsid()
        with open(log, "ab", opener=open_plain) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        status = run_nodes(job, run_dir, on_started=lambda: _tell(writer, _STARTED))
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        _tell(writer, str(error).encode()[: select.PIPE_BUF])
        status = error.exit_status
    except BaseException:  # noqa: BLE001  nobody is above this one
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _tell(writer: int, said: bytes) -> None:
    try:
        os.write(writer, said)
    except BrokenPipeError:
        # Whoever waited was ended; the run goes on.
        return

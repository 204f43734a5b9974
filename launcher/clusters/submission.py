"""Hand rendered files to a cluster's own command, and keep what it said."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import OutsideError

_SUBMIT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What was submitted: the command, the cluster's name for the job, its words."""

    command: tuple[str, ...]
    job_id: str
    output: str
    uid: str = ""
    """What tells the job from a later one of its name, where the cluster has that."""
    warning: str = ""
    """What did not work, though the job runs."""


def run_program(
    command: Sequence[str], folder: Path, text: str = "", timeout_s: float = _SUBMIT_TIMEOUT_S
) -> str:
    """Run a cluster's command in a folder, with a text as its input; return what it printed.

    Blocks until the deadline at most. Raises OutsideError with the program's own
    words where it is missing, fails, or does not end.
    """
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError as error:
        raise OutsideError(
            f"no program {command[0]!r} on this machine's PATH; submit from a node that has it, "
            "or use action=render"
        ) from error
    except OSError as error:
        raise OutsideError(f"cannot run {shown}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise OutsideError(f"{shown} did not end within {timeout_s:.0f} s") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()) or "it printed nothing"
        raise OutsideError(f"{shown} ended with exit status {done.returncode}:\n{words}")
    return done.stdout

"""Hand rendered files to a cluster's own command, and keep what it said."""

from __future__ import annotations

import getpass
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
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
    """Steps that failed although the job runs, or variables that it may miss."""


def current_user() -> str:
    """Return the name of the person who runs this."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A number without a name, as in a container.
        return "somebody"


def submitter(folder: Path) -> str:
    """Return who submits a run's folder, and where it lies."""
    return f"{current_user()}@{socket.gethostname()}:{folder.absolute()}"


def run_program(
    command: Sequence[str], folder: Path, text: str = "", timeout_s: float = _SUBMIT_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """Run a cluster's command in a folder, with a text as its input; return what it printed.

    Without `environment` it has that of this process. Blocks until the deadline at most.
    Raises OutsideError with the program's own words where it is missing, fails, or does not end.
    """
    shown = shlex.join(command)
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, input=text.encode(), capture_output=True,
            timeout=timeout_s,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise OutsideError(
            f"no program {command[0]!r} on this machine's PATH; submit from a node that has it, "
            "or use action=render"
        ) from error
    except OSError as error:
        raise OutsideError(f"cannot run {shown}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise OutsideError(f"{shown} did not end within {timeout_s:.0f} s") from error
    # As bytes: a carriage return within a line of a log would else end it.
    out, err = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
    if done.returncode:
        words = (err.strip() or out.strip()) or "it printed nothing"
        raise OutsideError(f"{shown} ended with exit status {done.returncode}:\n{words}")
    return out

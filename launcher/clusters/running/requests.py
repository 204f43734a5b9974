"""The files in a run's folder that say who has asked for its end, or for another size."""

from __future__ import annotations

import json
import pwd
import time
from contextlib import suppress
from pathlib import Path

from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.lock import read_lock
from launcher.clusters.submission import current_user
from launcher.errors import OutsideError
from launcher.monitor.standing import CancelRequest
from launcher.rundir import write_whole
from resilience.events import TIME_MAX
from resilience.plain_files import parse_json, read_plain

CANCELLED_FILE = "cancelled.json"
SIZE_FILE = "size.json"


def write_request(run: RunFolder) -> None:
    """Note that this start of the run is asked to end, now. Raises OutsideError."""
    _write(run, CANCELLED_FILE, {"job_id": _start_of(run)}, "its status will not say who asked")


def write_size(run: RunFolder, num_nodes: int) -> None:
    """Note how many nodes the run is to have. Raises OutsideError."""
    _write(run, SIZE_FILE, {"nodes": num_nodes}, "the run keeps its size")


def _write(run: RunFolder, name: str, asked: dict[str, object], else_so: str) -> None:
    content = {**asked, "user": current_user(), "time": time.time()}
    try:
        write_whole(run.path / name, json.dumps(content) + "\n")
    except OSError as error:
        raise OutsideError(f"cannot write to {run.path}: {error.strerror}; {else_so}") from error


def read_size(run_dir: Path) -> int | None:
    """Return how many nodes a run is to have, None where nobody has said it."""
    try:
        return int(parse_json(read_plain(run_dir / SIZE_FILE))["nodes"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def forget_size(run_dir: Path) -> None:
    """Take away what an earlier start was asked for. Raises OutsideError."""
    try:
        (run_dir / SIZE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise OutsideError(f"cannot write to {run_dir}: {error.strerror}") from error


def withdraw_request(run: RunFolder) -> None:
    """Take the note away: nobody could be asked."""
    with suppress(OSError):
        (run.path / CANCELLED_FILE).unlink()


def read_request(run: RunFolder) -> CancelRequest | None:
    """Return who has asked for the end of this start of the run, None where nobody has."""
    try:
        content = parse_json(read_plain(run.path / CANCELLED_FILE))
        at = float(content["time"])
        if content["job_id"] != _start_of(run) or not abs(at) < TIME_MAX:
            return None
        return CancelRequest(user=str(content["user"]), time=at)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _start_of(run: RunFolder) -> str:
    """Return what names a start of the run: another has another."""
    if run.job_id:
        # On Kubernetes another job has the same name, and another uid.
        return " ".join([run.job_id, *filter(None, [str(run.submitted.get("uid", ""))])])
    holder = read_lock(run.path)
    return holder.run_id if holder else ""


def user_name(uid: int) -> str:
    """Return the name of a user, or their number where they have none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

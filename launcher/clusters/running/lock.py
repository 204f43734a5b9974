"""The lock by which it is known whether a run on this machine lives.

The launcher of a run holds it as long as it is there. The kernel lets it go with the process, in
whatever way that ends; a process number alone may be another process's by now. The file stays, and
says who had it last.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import OutsideError
from launcher.holding import take_lock
from resilience.agent.evidence.locks import (
    LAUNCHER_LOCK,
    is_file_locked,
    open_names,
    read_boot_id,
)
from resilience.plain_files import open_plain, parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The launcher that has a run's lock, or had it last."""

    pid: int
    run_id: str
    """In the environment of every process of the run."""
    host: str
    boot_id: str
    """Of the machine's start, where it is known."""
    is_held: bool

    @property
    def is_here(self) -> bool:
        """Return whether it is, or was, a process of this machine since its last start."""
        return self.boot_id == read_boot_id()


@contextmanager
def held_lock(run_dir: Path, run_id: str) -> Iterator[None]:
    """Hold a run's lock within the block. Raises OutsideError where another launcher has it."""
    path = run_dir / LAUNCHER_LOCK
    try:
        file = open_plain(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise OutsideError(f"cannot make {path}: {error.strerror}") from error
    try:
        _take(file, run_dir)
        holder = {"pid": os.getpid(), "run_id": run_id, "host": socket.gethostname()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({**holder, "boot_id": read_boot_id()}).encode(), 0)
        yield
    finally:
        os.close(file)


def _take(file: int, run_dir: Path) -> None:
    try:
        take_lock(file)
    except BlockingIOError as error:
        raise OutsideError(f"another launcher runs in {run_dir}") from error
    except OSError as error:
        raise OutsideError(
            f"cannot lock {run_dir / LAUNCHER_LOCK}: {error.strerror}; set run.dir to one "
            "whose file system has locks"
        ) from error
    if find_launchers(run_dir):
        raise OutsideError(
            f"another launcher runs in {run_dir}, and its {LAUNCHER_LOCK} was removed or moved"
        )


def read_lock(run_dir: Path) -> Holder | None:
    """Return who holds a run's lock or had it last; None where nobody ever had.

    Raises OSError where the file cannot be read.
    """
    try:
        file = open_plain(run_dir / LAUNCHER_LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        is_held = is_file_locked(file)
        content = parse_json(os.pread(file, 1 << 12, 0))
        return Holder(
            pid=_to_pid(content["pid"]),
            run_id=str(content["run_id"]),
            host=str(content["host"]),
            boot_id=str(content["boot_id"]),
            is_held=is_held,
        )
    except (ValueError, LookupError, TypeError):
        # Its launcher is writing it, or was killed over that.
        return Holder(pid=0, run_id="", host="", boot_id=read_boot_id(), is_held=is_held)
    finally:
        os.close(file)


def is_other_run(run_dir: Path, run_id: str) -> bool:
    """Return whether the lock of a folder is of another run than its own launcher has begun."""
    with suppress(OSError):
        return (holder := read_lock(run_dir)) is not None and holder.run_id not in ("", run_id)
    return False


def _to_pid(value: Any) -> int:
    if not 0 <= (pid := int(value)) < 1 << 31:
        raise ValueError("no process has this number")
    return pid


def find_launchers(run_dir: Path) -> list[int]:
    """Return this machine's launchers of a run whose folder, or its lock, was removed or moved.

    Each holds its folder, and a lock that the folder does not name.
    """
    folder, pids = str(run_dir.resolve()), set[str]()
    with suppress(OSError):
        pids.update(line.split()[4] for line in Path("/proc/locks").read_text().splitlines())
    return [int(pid) for pid in pids if pid.isdigit() and _has_lost(Path("/proc", pid), folder)]


def _has_lost(process: Path, folder: str) -> bool:
    locked = open_names(process, locked=True)
    num_folders = sum(name in (folder, f"{folder} (deleted)") for name in locked)
    return 0 < num_folders < len(locked) and f"{folder}/{LAUNCHER_LOCK}" not in locked


def has_lock_open(pid: int, run_dir: Path) -> bool:
    """Return whether a process of this user has a run's lock open. Any mount of the folder counts.

    A number that another container has written may be anybody's here.
    """
    lock, names = run_dir / LAUNCHER_LOCK, open_names(Path(f"/proc/{pid}"))
    with suppress(OSError):
        return any(lock.samefile(each) for each in names if each.endswith(f"/{LAUNCHER_LOCK}"))
    return False

"""Processes that SIGKILL does not end, as one in state D is not."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PTRACE_DETACH, _PTRACE_SEIZE = 17, 0x4206
_PTRACE_O_TRACEEXIT = 0x40
_WALL = 0x40000000
_END_DEADLINE_S = 10.0
_FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def traced(pid: int) -> Iterator[None]:
    """Kill a process and hold it where it ends, with all that it has, until the block is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(_PTRACE_SEIZE, pid, None, _PTRACE_O_TRACEEXIT):
        pytest.skip(f"ptrace is refused here: {os.strerror(ctypes.get_errno())}")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, _WALL)
    try:
        yield
    finally:
        libc.ptrace(_PTRACE_DETACH, pid, None, None)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a process until the block is left: it is in state D, and no signal reaches it."""
    group = _FREEZER / f"test-{uuid.uuid4().hex}"
    end = os.pidfd_open(pid)
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
    except OSError as error:
        pytest.skip(f"there is no freezer of cgroup v1 here: {error}")
    try:
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        os.kill(pid, signal.SIGKILL)
        select.select([end], [], [], _END_DEADLINE_S)
        os.close(end)
        group.rmdir()

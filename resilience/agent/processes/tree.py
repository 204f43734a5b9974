"""The processes of this machine, as far as workers have started them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resilience.inprocess.handles import AGENT_PID

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of the kernel's table of processes."""

    parent: int
    session: int
    processor_s: float
    """Seconds of processors that it has taken, and those of its children that it has waited for."""


def read_processes() -> dict[int, Process]:
    """Return all processes that live, by their numbers."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path of each would take as long again
        if not name.isdecimal():
            continue
        with suppress(OSError):
            words = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            found[int(name)] = Process(
                parent=int(words[1]),
                session=int(words[3]),
                processor_s=sum(map(int, words[11:15])) / _TICKS_A_SECOND,
            )
    return found


def sum_processor_s(processes: Mapping[int, Process], roots: Collection[int]) -> float:
    """Return what these processes have taken, and all that they have started, of processors.

    Each of the roots leads a session. Pure.
    """
    members = {pid for pid, each in processes.items() if pid in roots or each.session in roots}
    while more := {pid for pid, each in processes.items() if each.parent in members} - members:
        members |= more
    return sum(processes[pid].processor_s for pid in members)


def find_orphans(known: Collection[int]) -> list[int]:
    """Return this process's children that workers of this agent have left, but for known ones."""
    agent, mark = os.getpid(), f"{AGENT_PID}={os.getpid()}".encode()
    found = []
    for pid, each in read_processes().items():
        if each.parent == agent and pid not in known:
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
    return found

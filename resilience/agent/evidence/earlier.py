"""Agents of an earlier attempt of a run, which may live on where its scheduler does not reach them.

A scheduler that loses the daemon of a node starts the run again elsewhere, while the agent on that
node trains on. So each agent looks from time to time whether the scheduler has started its run
again, and then ends its workers at once. A new start waits for that before it begins. It kills what
is left on its own machine, which may stand still.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resilience.agent.coordination.founding import is_earlier, refuse_attempt
from resilience.agent.evidence.records import find_record
from resilience.agent.evidence.words import has_ended

LOOK_S = 5.0
"""Seconds between two looks for a later start of the run."""
PATIENCE_S = 3 * LOOK_S
"""Seconds that a new start waits for agents of earlier starts that may live."""
_PAUSE_S = 0.1
_KILL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedAgain:
    """The scheduler has started the run again, so that this agent's part of it is over."""

    name: str
    """Of the later attempt."""


def find_later(name: str, others: Sequence[str]) -> StartedAgain | None:
    """Return the last of the other attempts that is a later one of the same run. Pure."""
    later = [each for each in others if is_earlier(name, each)]
    return StartedAgain(name=later[-1]) if later else None


def find_newer_attempt(path: Path, run: str, attempt: int) -> str:
    """Return why an attempt may not begin the run of a folder; empty where it may."""
    newest = find_record(path)
    is_newer = newest and newest.run == run and newest.attempt > attempt
    return refuse_attempt(attempt, newest.attempt) if newest and is_newer else ""


def await_earlier(
    name: str,
    words: Iterable[Mapping[str, str]],
    say: Callable[[str], None],
    patience_s: float = PATIENCE_S,
) -> str:
    """Wait until the agents of earlier attempts have ended; returns which has not, or nothing.

    `words` are what agents have left in the run's folder. After the patience the processes on this
    machine are killed, and agents of other machines count as ended: they have seen this start, or
    stand still and see it first when they go on. Then their files are removed.
    """
    earlier = [each for each in words if is_earlier(each.get("run", ""), name)]
    end_s = time.monotonic() + patience_s
    left = _may_live(earlier)
    if left:
        say(f"waits up to {patience_s:g} s for agents of an earlier start of the run to end")
    while left and time.monotonic() < end_s:
        time.sleep(_PAUSE_S)
        left = _may_live(earlier)
    for path in left:
        if holders := _kill_holders(path):
            return (
                f"processes {holders} of an earlier start of the run do not end; {path} is theirs"
            )
    for each in earlier:
        with suppress(OSError):
            Path(each["path"]).unlink()
    return ""


def _may_live(words: Iterable[Mapping[str, str]]) -> list[Path]:
    """Return the files of agents that have neither taken theirs along nor let go of its lock."""
    paths = [Path(each["path"]) for each in words]
    return [each for each in paths if each.exists() and not has_ended(each)]


def _kill_holders(path: Path) -> list[int]:
    """Kill the processes of this machine that hold a file's lock; returns those that are left."""
    end_s = time.monotonic() + _KILL_S
    while (holders := _find_holders(path)) and time.monotonic() < end_s:
        for pid in holders:
            with suppress(OSError), os.fdopen(os.pidfd_open(pid)) as file:
                signal.pidfd_send_signal(file.fileno(), signal.SIGKILL)
                select.select([file], [], [], max(0.0, end_s - time.monotonic()))
    return holders


def _find_holders(path: Path) -> list[int]:
    """Return the processes that hold a file's lock, as far as this one may see them.

    The kernel names the lock also where a descriptor was inherited, and not to a mere reader.
    """
    found = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            for each in folder.iterdir():
                info = folder.parent / "fdinfo" / each.name
                if _is_same(each, path) and "FLOCK" in info.read_text():
                    found.add(int(folder.parent.name))
    return sorted(found)


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False

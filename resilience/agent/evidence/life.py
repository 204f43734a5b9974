"""Whether a run lives: by its processes and locks on this machine, and by its record elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from resilience.agent.coordination.founding import SILENCE_S, Record, attempt_name, find_others
from resilience.agent.evidence.locks import LAUNCHER_LOCK, is_lock_held, open_names
from resilience.agent.evidence.records import RECORDS_FOLDER, TornError, newest_record
from resilience.agent.evidence.words import AGENTS_FOLDER, find_ended
from resilience.run_record import RecordError, read_record


def judge_life(
    signs: Sequence[str], record: Record | None, *, renewed_s: float, ended: Collection[str]
) -> str:
    """Return by what a run is seen to live; empty where it has ended. Pure.

    `signs` are those that this machine shows. `renewed_s` is the age of the run's record, and
    `ended` are the nodes whose processes have ended for certain.
    """
    if record is None:
        return next(iter(signs), "")
    told = f"its record was renewed {renewed_s:.0f} s ago"
    if signs:
        return f"{signs[0]}; {told}"
    others = find_others(record, replace(record, agents=()), renewed_s, ended)
    return f"{others}: {told}, and counts for {SILENCE_S:.0f} s" if others else ""


def find_life(run_dir: Path, run_id: str) -> str | None:
    """Return by what a run lives, empty where it has ended, None where neither is seen from here.

    A folder that was removed, or is another run's by now, shows nothing of it. Waits for the disk.
    """
    record = None
    with suppress(OSError, RecordError):
        record = read_record(run_dir) if run_dir.is_absolute() else None
    if record is None or record.run_id != run_id:
        return next(_find_processes(run_dir, of_removed=record is not None), None)
    locks = [run_dir / LAUNCHER_LOCK, *(run_dir / AGENTS_FOLDER).glob("*")]
    held = (f"a process holds the lock of {each}" for each in locks if is_lock_held(each))
    try:
        newest = newest_record(run_dir)
        times = [each.stat().st_mtime for each in (run_dir / RECORDS_FOLDER).glob("run-*")]
    except (OSError, TornError) as error:
        return str(error)
    name = attempt_name(newest.run, newest.attempt) if newest else ""
    return judge_life(
        [*_find_processes(run_dir), *held],
        newest,
        renewed_s=max(0.0, time.time() - max(times, default=0.0)),
        ended=find_ended(run_dir, newest.agents, name, newest.starts) if newest else (),
    )


def _find_processes(run_dir: Path, *, of_removed: bool = False) -> Iterator[str]:
    """Yield the agents and daemons of this machine that were started for a folder.

    `of_removed`: for one that was there before, of which they have files open that are deleted.
    """
    word = f"--run-dir={run_dir}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().split(b"\0")
            if word in words and (not of_removed or _has_deleted(process, f"{run_dir}/")):
                what = b" ".join(words[1:3]).decode(errors="replace")
                yield f"process {process.name} ({what}) runs"


def _has_deleted(process: Path, below: str) -> bool:
    return any(
        name.startswith(below) and name.endswith(" (deleted)") for name in open_names(process)
    )

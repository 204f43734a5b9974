"""What the daemons of a machine say of checkpoints: asked, and laid out for a person."""

from __future__ import annotations

import os
import stat
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError, RefusedError
from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.news import STALL_S

WIDTH = 100
"""Columns that no line of a table passes."""

_TIMEOUT_S = 10.0
_PAUSE_FIRST_S = 0.02
_PAUSE_MAX_S = 0.5
_RAM_WIDTH = 38
_OTHERS_WIDTH = 80
_TITLES = ("step", "generation", "complete", "size", "in memory of (shards)", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one daemon said."""

    folder: Path
    reply: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return it with its folder, as JSON data."""
        return {"dir": str(self.folder), **self.reply}


def find_folders(parent: Path = Path("/dev/shm")) -> list[Path]:
    """Return the folders below `parent` in which a daemon of this user listens, or did."""
    found = []
    for each in sorted(parent.glob(f"*/{SOCKET_NAME}")):
        try:
            status = each.lstat()
        except OSError:
            continue  # it has ended meanwhile
        if status.st_uid == os.geteuid() and stat.S_ISSOCK(status.st_mode):
            found.append(each.parent)
    return found


def ask_daemon(folder: Path, *, token: str = "") -> Told:
    """Ask the daemon in a folder; LostError where none answers, RefusedError for a wrong token."""
    with TieredClient(folder / SOCKET_NAME, token=token) as client:
        return Told(folder=folder, reply=client.status(timeout_s=_TIMEOUT_S))


def wait_for_daemon(folder: Path, *, timeout_s: float, token: str = "") -> None:
    """Return as soon as the daemon in a folder answers; LostError after `timeout_s` seconds.

    Without a token, a daemon that asks for one has answered with that. RefusedError where
    the token is wrong.
    """
    end_s = time.monotonic() + timeout_s
    pause_s = _PAUSE_FIRST_S
    while True:
        rest_s = end_s - time.monotonic()
        try:
            with TieredClient(folder / SOCKET_NAME, token=token) as client:
                client.status(timeout_s=max(rest_s, _PAUSE_FIRST_S))
        except RefusedError:
            if token:
                raise
        except LostError as error:
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                raise LostError(
                    f"no daemon has answered in {folder} within {timeout_s:g} s; "
                    f"the last try said: {error}"
                ) from error
            # Nothing tells of a socket that somebody will listen on: the folder may not be
            # there yet, and the file of a killed daemon is there already. So it is asked
            # again, less and less often; a try costs some 0.1 ms.
            time.sleep(min(pause_s, rest_s))
            pause_s = min(_PAUSE_MAX_S, 1.5 * pause_s)
            continue
        return


def render_status(told: Sequence[Told]) -> str:
    """Return tables of daemons and of jobs, each job once though all daemons know it. Pure."""
    lines = []
    for each in told:
        lines += _daemon_lines(each)
    shown = set()
    for each in told:
        nodes = tuple(sorted(each.reply.get("nodes", {})))
        for namespace, job in each.reply.get("jobs", {}).items():
            if (namespace, job["job"], nodes) not in shown:
                shown.add((namespace, job["job"], nodes))
                lines += ["", *_job_lines(namespace, job)]
    if not shown:
        lines += ["", "no checkpoint yet"]
    return "\n".join(lines) + "\n"


def _daemon_lines(told: Told) -> list[str]:
    reply = told.reply
    nodes = reply.get("nodes", {})
    others = sorted(set(nodes) - {reply["node"]})
    text = (
        f"{told.folder}: {reply['node']} ({reply['domain']}), process {reply['pid']}, "
        f"{show_bytes(reply['held_bytes'])} held of {show_bytes(reply['budget_bytes'])}, "
        + (f"sees {_join(others, _OTHERS_WIDTH)}" if others else "sees no other node")
    )
    lines = _wrap(text)
    if store := reply.get("store"):
        state = "answers"
        if store.get("failing_s") is not None:
            state = f"has failed for {store['failing_s']:.0f} s: {store.get('last_error')}"
        elif (stalled_s := store.get("stalled_s") or 0.0) >= STALL_S:
            state = f"has not answered for {stalled_s:.0f} s"
        lines += _wrap(f"store {store['name']} {state}")
    return lines


def _job_lines(namespace: str, job: Mapping[str, Any]) -> list[str]:
    owner = "" if job["job"] in (None, namespace) else f" of job {job['job']}"
    lines = _wrap(f"namespace {namespace}{owner}")
    for name, place in (("peers", "enough other memory"), ("store", "the store")):
        lag = job["lag"].get(name)
        if lag and lag["num_shards"]:
            lines += _wrap(
                f"  on the way to {place}: {lag['num_shards']} shards, "
                f"{show_bytes(lag['num_bytes'])}, for {lag['seconds']:.1f} s"
            )
    if not job["steps"]:
        return [*lines, "  no step"]
    if job["lag"].get("store"):
        whole = [each for each in job["steps"] if not each["is_stale"]]
        kept = (each for each in whole if each["store"] == each["num_shards"] > 0)
        stored = max((each["step"] for each in kept), default=None)
        of = f"of {max(each['step'] for each in whole)}" if whole else "at all"
        lines += [f"  in the store: {'no step' if stored is None else f'step {stored}'} {of}"]
    rows = [_TITLES, *map(_row, job["steps"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_TITLES))]
    for row, step in zip(rows, (None, *job["steps"]), strict=True):
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
        if step and not (step["is_complete"] and not step["is_stale"]):
            lines += _wrap(f"    {step['reason']}")
    return lines


def _row(step: Mapping[str, Any]) -> tuple[str, ...]:
    number = step["num_shards"]
    ram = [f"{node} {held}/{number}" for node, held in step["ram"].items()]
    complete = "stale" if step["is_stale"] else "yes" if step["is_complete"] else "no"
    return (
        str(step["step"]),
        str(step["generation"]),
        complete,
        show_bytes(step["num_bytes"]),
        _join(ram, _RAM_WIDTH) or "-",
        f"{step['store']}/{number}" if step["store"] else "-",
    )


def show_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the unit that reads best: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _join(texts: Sequence[str], width: int) -> str:
    """Return as many as fit, and how many more there are."""
    for number in range(len(texts), 0, -1):
        more = f" and {len(texts) - number} more" if number < len(texts) else ""
        if len(line := ", ".join(texts[:number]) + more) <= width:
            return line
    return f"{len(texts)} nodes" if texts else ""


def _wrap(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, WIDTH, subsequent_indent=f"{indent}  ", break_on_hyphens=False)

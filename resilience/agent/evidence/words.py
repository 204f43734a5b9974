"""The files by which agents know each other in a run's folder, one of each agent that lives."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from resilience.agent.evidence.locks import is_lock_held, read_boot_id
from resilience.plain_files import parse_json, read_plain
from resilience.whole_files import write_whole

AGENTS_FOLDER = "agents"
_ENDED = "ended"


def find_words(path: Path) -> list[dict[str, str]]:
    """Return what agents have left in a run's folder, the newest first: `node`, `path` and more.

    An agent that was killed has not taken its word back. Waits for the disk.
    """
    found: list[tuple[float, dict[str, str]]] = []
    with suppress(OSError):
        for each in (path / AGENTS_FOLDER).iterdir():
            word = read_word(each)
            if word.keys() >= {"node", "address"}:
                found.append((each.stat().st_mtime, {**word, "path": str(each)}))
    return [word for _, word in sorted(found, key=lambda each: each[0], reverse=True)]


def read_word(path: Path) -> dict[str, str]:
    """Return what an agent has left in a file; nothing where that is no such file."""
    with suppress(OSError, ValueError):
        word = parse_json(read_plain(path))
        if isinstance(word, dict):
            return {str(key): str(value) for key, value in word.items()}
    return {}


def has_ended(path: Path) -> bool:
    """Return whether the agent of a file has ended: by its own word, or on this machine."""
    word, here = read_word(path), read_boot_id()
    is_free = bool(here) and word.get("boot") == here and is_lock_held(path) is False
    return is_free or _ENDED in word


def mark_end(path: Path, writer: str) -> None:
    """Have the word of an agent that ends in order say so, in place of its address."""
    word = read_word(path)
    if word.keys() >= {"run", "node"}:
        write_whole(path, {"run": word["run"], "node": word["node"], _ENDED: "in order"}, writer)


def find_ended(
    path: Path, names: Collection[str], run: str, heard: Iterable[tuple[str, str]] = ()
) -> dict[str, set[str]]:
    """Return which agents of a run's attempt have ended for certain, and as which starts.

    Of one that has been started again since it was heard of the newest start counts as well. An
    agent of which a start was `heard` that has left no word here may live.
    """
    starts = {name: {path / AGENTS_FOLDER / start} for name, start in heard}
    with suppress(OSError):
        for each in (path / AGENTS_FOLDER).iterdir():
            word = read_word(each)
            if word.get("run") == run and word.get("node") in names:
                starts.setdefault(word["node"], set()).add(each)
    ended = (name for name, found in starts.items() if all(map(has_ended, found)))
    return {name: {each.name for each in starts[name]} for name in ended}

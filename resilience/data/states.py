"""States of loaders that cannot begin at any batch, kept beside the batches.

A new producer loads the newest at or before its first batch, and a checkpoint takes it along, so
that neither has to read what stands before. Each is a small file that appears by rename: a checksum
in hexadecimal, then JSON. A damaged file counts as none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from resilience.data.sources import SourceState

EVERY = 16
"""A state is kept of every batch that this divides."""

_NAME = re.compile(r"state-(\d{1,18})\.json")


def write_state(folder: Path, state: SourceState) -> None:
    """Keep a state; several processes may keep the same one."""
    path = folder / f"state-{state.batch}.json"
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"batch": state.batch, "state": state.state})
    try:
        hidden.write_text(f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}")
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def find_state(folder: Path, number: int) -> SourceState | None:
    """Return the newest state at or before a batch; None where there is none."""
    for batch in sorted(_batches(folder), reverse=True):
        if batch <= number:
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                return _read_state(folder / f"state-{batch}.json", batch)
    return None


def _read_state(path: Path, batch: int) -> SourceState:
    """Return what a file holds; ValueError where it is damaged, or was another's."""
    checksum, _, text = path.read_text().partition(" ")
    if checksum != xxhash.xxh3_64_hexdigest(text.encode()):
        raise ValueError(f"{path} is damaged")
    state = parse_state(json.loads(text))
    if state.batch != batch:
        raise ValueError(f"{path} holds the state of batch {state.batch}")
    return state


def parse_state(content: Mapping[str, Any]) -> SourceState:
    """Return a state from what a file or a checkpoint has of it."""
    return SourceState(batch=int(content["batch"]), state=content["state"])


def prune_states(folder: Path, oldest: int) -> None:
    """Delete the states that are of no use to begin at the oldest batch or later."""
    before = sorted(each for each in _batches(folder) if each <= oldest)
    for batch in before[:-1]:
        (folder / f"state-{batch}.json").unlink(missing_ok=True)


def _batches(folder: Path) -> list[int]:
    names = os.listdir(folder)  # noqa: PTH208 - as fast as can be
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]

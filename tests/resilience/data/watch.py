"""Reads what real producers have made, and sees to it that nothing of a scene is left behind."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilience.data.folder import ALIVE_NAME, PRODUCER_LOCK_NAME
from resilience.data.loader import CachedLoader
from resilience.data.spawn import connect_producer, reap_producers
from tests.processes import parents, wait_for_end
from tests.resilience.data.scene import Scene, make_batch
from tests.resilience.data.segment_files import open_files

MARK = "BATCH_CACHE_TEST"
"""An environment variable by which a test knows the processes that it has caused."""


def read(loader: CachedLoader, *numbers: int) -> None:
    """Read batches and compare every bit."""
    for number in numbers:
        check(loader.read(number), number)


def check(batch: dict[str, Any], number: int) -> None:
    assert batch["number"] == number
    assert np.array_equal(batch["x"], make_batch(number, len(batch["x"])))


@contextmanager
def watched_scene(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Give a scene, and see to it that after its end nothing of it is left but the cache."""
    temporary = folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv(MARK, str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    scene = Scene(folder)
    gc.collect()
    num_files, children = open_files(), _children()
    try:
        yield scene
    finally:
        scene.close()
        for pid in find_processes(folder):
            wait_for_end(pid)
    reap_producers()
    # Errors that were caught hold batches, and these hold mappings.
    gc.collect()
    assert _children() <= children
    assert open_files() <= num_files
    assert list(temporary.iterdir()) == []
    assert not {each.name for each in folder.iterdir() if each.name.startswith(".")}
    for root in (path.parent for path in folder.rglob(ALIVE_NAME)):
        _check_root(root)


def find_processes(folder: Path) -> list[int]:
    """Return the processes that the test of a folder has caused and that still run."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return sorted(found)


def _children() -> set[int]:
    """Return our own children that have not been waited for."""
    return {child for child, parent in parents().items() if parent == os.getpid()}


def _check_root(root: Path) -> None:
    """Check that no lock is held, that no socket listens, and that no file is half made."""
    locks = [root / ALIVE_NAME, *root.glob(f"*/{PRODUCER_LOCK_NAME}")]
    for lock in locks:
        with lock.open("rb+") as file:
            # A process that is ending has no environment any more, but still its files.
            fcntl.flock(file, fcntl.LOCK_EX)
    for cache in root.glob("*-*of*/"):
        assert connect_producer(cache) is None
    assert [each.name for each in root.rglob(".*") if each.name != ".p.sock"] == []


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[None]:
    """Mount something on a folder, which the test may not have the right to."""
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"needs the right to mount: {result.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)

"""Sources for real producers, settings, and a consumer in another process.

Sources know numpy alone, so that their producers start fast. What they have done they write to
a file, one line each, as another process cannot be asked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from resilience.data.loader import CachedLoader, cached
from resilience.data.segments import SegmentReader
from resilience.data.sources import Source, Start
from resilience.settings import MmapSettings
from tests.processes import wait_for_end

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
"""What takes longer hangs."""


class SampleError(IndexError):
    """An error of a dataset, and no end of it, whose constructor takes no text."""

    def __init__(self, sample: int) -> None:
        super().__init__(f"sample {sample} is torn")
        self.sample = sample


class NeedyError(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, value: object) -> None:
        super().__init__(value)


def make_batch(number: int, num_items: int = 64) -> npt.NDArray[np.int64]:
    """Return the content of a batch, which is that of no other."""
    return np.arange(num_items, dtype=np.int64) + 1_000 * number


def count_up(
    start: Start, *, log: str = "", num_items: int = 64, num_batches: int = 1_000_000
) -> Iterator[dict[str, Any]]:
    """Yield batches that tell their number."""
    _write(log, f"open {start.batch} {os.getpid()}")
    for number in range(start.batch, num_batches):
        _write(log, f"make {number}")
        yield {"x": make_batch(number, num_items), "number": number}


def fail_at(start: Start, *, number: int, marker: str, log: str = "") -> Iterator[dict[str, Any]]:
    """Raise an error at a batch, as long as the marker is there."""
    for batch in count_up(start, log=log):
        if batch["number"] == number and Path(marker).exists():
            raise SampleError(number)
        yield batch


def hold_at(start: Start, *, number: int, gate: str, log: str = "") -> Iterator[dict[str, Any]]:
    """Wait before a batch until somebody opens a pipe for writing, perhaps for ever."""
    for batch in count_up(start, log=log):
        if batch["number"] == number:
            with Path(gate).open("rb") as pipe:
                pipe.read()
        yield batch


class Stateful:
    """A loader that begins at 0 and knows where it is."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.number += 1
            _write(self.log, f"make {self.number - 1}")
            yield {"x": make_batch(self.number - 1), "number": self.number - 1}

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def make_stateful(*, log: str) -> Stateful:
    _write(log, f"open 0 {os.getpid()}")
    return Stateful(log)


def end_itself(start: Start, *, log: str) -> Iterable[Any]:
    """End the process, as a crash in a library does."""
    _write(log, f"open {start.batch} {os.getpid()}")
    os._exit(3)


def start_child(start: Start, *, log: str) -> Iterator[dict[str, Any]]:
    """Fork a process that would live on, as a DataLoader does."""
    child = os.fork()
    if child == 0:
        signal.pause()
    _write(log, f"child {child}")
    yield from count_up(start, log=log)


def fork_in_a_child(start: Start, *, log: str) -> Iterator[dict[str, Any]]:
    """Fork a process that forks in its turn, as a dataset in a DataLoader's worker does."""
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(7)
        _write(log, f"status {_wait_for_status(grandchild)}")
        os._exit(0)
    _wait_for_status(child)
    yield from count_up(start, log=log)


def fork_in_a_thread(start: Start, *, log: str) -> Iterator[dict[str, Any]]:
    """Fork in a thread of one's own and end that process, as a pool does with its workers."""

    def work() -> None:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"1")
            signal.pause()
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _write(log, f"status {_wait_for_status(child)}")
        os.close(ready)
        os.close(tell)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    yield from count_up(start, log=log)


def _wait_for_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _write(log: str, line: str) -> None:
    if log:
        with Path(log).open("a") as file:
            file.write(f"{line}\n")


def make_settings(folder: Path, **changes: Any) -> MmapSettings:
    values = {
        "folder": str(folder),
        "prefetch_length": 8,
        "val_prefetch_length": 4,
        "lookback_length": 2,
        "val_lookback_length": 1,
        "checkpoint_frequency": None,
        "budget_mib": 16,
        "keep_s": 600,
        "deadline_s": LIMIT_S,
        "encryption": None,
    }
    return MmapSettings(**{**values, **changes})


class Scene:
    """A job's folder, and loaders of it that are closed in the end with their producer."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cache" / "job"
        self.log = folder / "log"
        self.loaders: list[CachedLoader] = []

    def open(
        self,
        source: Callable[..., Any] = count_up,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> CachedLoader:
        """Return a loader of a source; `more` goes to `cached`, what names a setting to that."""
        reference = more.pop("reference", None)
        names = set(MmapSettings.model_fields)
        changes = {key: more.pop(key) for key in names & set(more)}
        arguments = {"identity": {"data": "test"}, "job": "job", **more}
        factory: Any = partial(source, log=str(self.log), **(options or {}))
        if reference:
            factory = Source(reference)
        root = Path(changes.pop("folder", self.root.parent))
        loader = cached(factory, make_settings(root, **changes), **arguments)
        self.loaders.append(loader)
        return loader

    def lines(self, verb: str) -> list[int]:
        """Return the numbers of what the sources have done."""
        return [int(line.split()[1]) for line in self._words() if line.startswith(f"{verb} ")]

    def producers(self) -> list[int]:
        """Return the producers that have opened a source, by their pid."""
        opened = [line for line in self._words() if line.startswith("open ")]
        return list(dict.fromkeys(int(line.split()[2]) for line in opened))

    def segments(self) -> list[Path]:
        return sorted(self.root.glob("*/segment-*"))

    def held(self) -> set[int]:
        """Return the numbers of the batches that lie in the folder."""
        held: set[int] = set()
        for loader in self.loaders[:1]:
            fingerprint = bytes.fromhex(loader._spec.fingerprint)
            for path in self.segments():
                with SegmentReader.open(path, fingerprint) as segment:
                    held.update(segment.numbers)
        return held

    def close(self) -> None:
        for loader in self.loaders:
            loader.close(is_over=True)

    def _words(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def run_script(text: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that runs Python."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )


def end_process(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there, and wait for its end."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    wait_for_end(pid)

"""A job as its node sees it: an owner, workers in processes of their own, and their producers.

The workers do what they are told batch by batch, so that a test decides at which one a fault
comes. What the source does first can be held up: whatever is read meanwhile was in the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from resilience.data.loader import CachedLoader, cached
from resilience.data.sources import PositionBatchSampler, Start
from tests.processes import wait_for_end
from tests.resilience.data.scene import _write, end_process, make_settings, run_script

SAMPLES_PER_BATCH = 8
NUM_SAMPLES = 1_009
"""No multiple of a batch: the sequence repeats nothing for long."""

WORK = "from tests.resilience.data.job import work; work()"


def shuffled(
    start: Start, *, log: str, gate: str, num_batches: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield batches of shuffled samples, no two of one size; begins when the gate is open."""
    log = log and f"{log}.{start.rank}"
    _write(log, f"open {start.batch}")
    with Path(gate).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
    sampler = PositionBatchSampler(
        num_samples=NUM_SAMPLES,
        seed=3,
        samples_per_batch=SAMPLES_PER_BATCH,
        rank=start.rank,
        size=start.size,
        samples_consumed=start.samples_consumed,
    )
    for number, samples in enumerate(sampler, start.batch):
        if number == num_batches:
            return
        _write(log, f"make {number}")
        rng = np.random.default_rng([number, *samples])
        yield {"samples": samples, "x": rng.random(300 + sum(samples)), "number": number}


def expected_digests(folder: Path, count: int, *, rank: int = 0, size: int = 1) -> list[str]:
    """Return what the source yields where nothing disturbs it."""
    gate = folder / "open-gate"
    gate.touch()
    start = Start(batch=0, samples_consumed=0, rank=rank, size=size, stage="train")
    return [digest(each) for each in islice(shuffled(start, log="", gate=str(gate)), count)]


def digest(batch: dict[str, Any]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for key, value in batch.items():
        array = np.asarray(value)
        total.update(f"{key} {array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return total.hexdigest()


def work() -> None:
    """Be a worker: answer each line of standard input by one, until there is none."""
    options = json.loads(sys.argv[1])
    loader = open_loader(options, int(sys.argv[2]))
    for line in sys.stdin:
        verb, number = line.split()
        answer = "done"
        if verb == "read":
            answer = _read(loader, int(number))
        elif verb == "checkpoint":
            loader.note_checkpoint(int(number))
        elif verb == "reopen":
            loader.close()
            loader = open_loader(options, int(number))
        elif verb == "torch":
            answer = str(any(name.split(".")[0] == "torch" for name in sys.modules))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()
    loader.close()


def open_loader(options: dict[str, Any], number: int) -> CachedLoader:
    folder = Path(options["folder"])
    positions = options["positions"]
    factory = partial(
        shuffled,
        log=str(folder / "log"),
        gate=options["gate"],
        **({"num_batches": options["num_batches"]} if "num_batches" in options else {}),
    )
    return cached(
        factory,
        make_settings(folder / "cache", **options["settings"]),
        identity={"data": "shuffled"},
        job="job",
        samples_per_batch=SAMPLES_PER_BATCH,
        samples_consumed=number * SAMPLES_PER_BATCH,
        rank=positions[options["rank"]],
        size=max(positions) + 1,
        stage=options["stage"],
        owner_pid=options["owner_pid"],
    )


class Worker:
    """A worker that is told what to do."""

    def __init__(self, options: dict[str, Any], number: int) -> None:
        self.process = run_script(WORK, json.dumps(options), str(number))

    def say(self, verb: str, number: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {number}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Job:
    """The processes of a job; its workers read the same batches, or each those of its rank."""

    def __init__(self, folder: Path, *, num_workers: int = 2, **options: Any) -> None:
        self.folder = folder
        self.workers: list[Worker] = []
        self._num_workers = num_workers
        self._gate_path = folder / "gate"
        self._gate = os.open(self._gate_path, os.O_RDWR | os.O_CREAT)
        self._owner: subprocess.Popen[bytes] | None = None
        self._options = {
            "folder": str(folder),
            "gate": str(self._gate_path),
            "stage": "train",
            "positions": [0] * num_workers,
            "settings": {},
            **options,
        }

    def start(self, number: int = 0) -> None:
        """Start the owner, and the workers with what is read first."""
        self._owner = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.workers = [self._start_worker(rank, number) for rank in range(self._num_workers)]

    def replace(self, worker: Worker, number: int) -> None:
        """Start a worker in the place of one that has ended."""
        rank = self.workers.index(worker)
        self.workers[rank] = self._start_worker(rank, number)

    def ask(self, verb: str, number: int = 0) -> list[str]:
        """Return the answers of all workers; they are at it at the same time."""
        for worker in self.workers:
            worker.say(verb, number)
        return [worker.hear() for worker in self.workers]

    def end_owner(self) -> None:
        if self._owner is not None:
            self._owner.kill()
            self._owner.communicate()

    def close_gate(self) -> None:
        """From now on no source yields anything that is opened."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)

    def open_gate(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        """End the job; its producers have then ended by themselves."""
        self.open_gate()
        producers = find_producers(self.folder)
        for worker in self.workers:
            worker.end()
        self.end_owner()
        os.close(self._gate)
        for pid in producers:
            wait_for_end(pid)
        assert not find_producers(self.folder)

    def _start_worker(self, rank: int, number: int) -> Worker:
        assert self._owner is not None
        return Worker({**self._options, "rank": rank, "owner_pid": self._owner.pid}, number)


def find_producers(folder: Path) -> list[int]:
    """Return the producers whose cache lies anywhere in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        # Processes and their files go while they are looked at.
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"resilience.data.producer" in words and _has_open(process, folder):
                found.append(int(process.name))
    return found


def _has_open(process: Path, folder: Path) -> bool:
    for file in (process / "fd").iterdir():
        with suppress(OSError):
            if file.readlink().is_relative_to(folder):
                return True
    return False


def kill_producers(folder: Path) -> None:
    for pid in find_producers(folder):
        end_process(pid, signal.SIGKILL)


def logged(folder: Path, verb: str, *, rank: int = 0) -> list[int]:
    """Return the numbers of what the sources of a position have done."""
    path = folder / f"log.{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(f"{verb} ")]


def _read(loader: CachedLoader, number: int) -> str:
    try:
        return digest(loader.read(number))
    except IndexError:
        return "end"

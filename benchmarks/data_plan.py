"""What the rows of the benchmark of data share: the plan, its sources, and our loader."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.data_figures import Measured
from benchmarks.processes import find_processes
from resilience.data import CachedLoader, Source, cached
from resilience.data.format import PUBLISHED_OFFSET, unpack_published
from resilience.settings import MmapSettings

NUM_TOKENS = 8192
"""Of a batch, in 64 bits: 64 KiB."""
BATCH_BYTES = NUM_TOKENS * 8
JOB = "benchmark"
DEFAULTS = Path(__file__).parents[1] / "conf" / "resilience" / "mmap" / "default.yaml"
SOURCES = "benchmarks.data_sources"
LIMIT_S = 300.0
PAUSE_S = 0.01
"""How often a row looks for what its processes do."""
_PRODUCER = b"\0resilience.data.producer\0"

Batch = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all processes of a row know."""

    folder: Path
    """Own to the row, on tmpfs."""
    laps: int
    num_read: int
    """Batches of a lap of reading, all of them in the cache."""
    num_made: int
    """Batches of a lap in which the producer works."""
    num_consumers: int
    resume_sample: int


def write_plan(plan: Plan) -> str:
    """Return a plan as a word of a command line."""
    return json.dumps({**dataclasses.asdict(plan), "folder": str(plan.folder)})


def read_plan(text: str) -> Plan:
    """Read it back."""
    content = json.loads(text)
    return Plan(**{**content, "folder": Path(content["folder"])})


def run_row(measure: Callable[[Plan], Measured]) -> None:
    """Measure what the command line says, and leave the figures for who started the row."""
    torch.set_num_threads(1)
    plan = read_plan(sys.argv[1])
    measured = measure(plan)
    (plan.folder / "figures.json").write_text(json.dumps(dataclasses.asdict(measured)))


def make_source(function: str, **arguments: Any) -> Source:
    """Return a source of this benchmark."""
    return Source(f"{SOURCES}:{function}", arguments)


def make_settings(folder: Path, **changes: Any) -> MmapSettings:
    """Return the settings that recipes have by default, with changes."""
    defaults = yaml.safe_load(DEFAULTS.read_text("utf-8"))
    return MmapSettings(**{**defaults, "folder": str(folder), **changes})


def open_loader(settings: MmapSettings, source: Source, **options: Any) -> CachedLoader:
    """Return our loader, a sample a batch unless the options say otherwise."""
    return cached(source, settings, identity={"dataset": "benchmark"}, job=JOB, **options)


@contextlib.contextmanager
def fresh_folder(plan: Plan) -> Iterator[Path]:
    """Give an empty folder for caches; afterwards wait for its producers' end, and delete it.

    Its loaders have to be closed with `is_over` before.
    """
    folder = plan.folder / "cache"
    yield folder
    for path in folder.rglob("producer.lock"):
        with path.open("r+b") as lock:
            # The producer holds it as long as it lives.
            fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.rmtree(folder)


def list_segments(folder: Path) -> list[Path]:
    """Return the segments of all caches of a folder."""
    return list(folder.rglob("segment-*.batches"))


def find_producers(plan: Plan) -> list[int]:
    """Return the producers of a row."""
    found = []
    for pid in find_processes(str(plan.folder)):
        with contextlib.suppress(OSError):
            if _PRODUCER in Path("/proc", str(pid), "cmdline").read_bytes():
                found.append(pid)
    return found


def touch(batch: Batch) -> int:
    """Read all of a batch."""
    return int(batch["tokens"].sum())


def check(total: int, wanted: int) -> None:
    """End the benchmark where batches were wrong."""
    if total != wanted:
        raise SystemExit(f"the batches were wrong: they sum up to {total}, not to {wanted}")


def expected_sum(numbers: range) -> int:
    """Return what `touch` sums up to over batches of the counting source."""
    return sum(numbers) * NUM_TOKENS


def count_published(folder: Path) -> int:
    """Return how many batches the segments of all caches of a folder say that they hold."""
    count = 0
    for path in list_segments(folder):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as segment:
            segment.seek(PUBLISHED_OFFSET)
            count += unpack_published(int.from_bytes(segment.read(8), sys.byteorder))
    return count


def wait_until(count: Callable[[], int], wanted: int) -> tuple[int, float]:
    """Wait for a count; returns what it was, and when."""
    end_s = time.perf_counter() + LIMIT_S
    while True:
        value, now_s = count(), time.perf_counter()
        if value >= wanted:
            return value, now_s
        if now_s > end_s:
            raise SystemExit(f"{wanted} did not come within {LIMIT_S:.0f} s; it is at {value}")
        time.sleep(PAUSE_S)

"""How much memory consumers of one position take that all hold the same batches.

    python -m benchmarks.data_memory PLAN [consumer]

Counted are the proportional set sizes of what is mapped of the cache, by all consumers and the
producer, and what the consumers have gained of their own since their first batch.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import data_figures as figures
from benchmarks.data_plan import (
    BATCH_BYTES,
    NUM_TOKENS,
    Plan,
    check,
    expected_sum,
    find_producers,
    fresh_folder,
    make_settings,
    make_source,
    open_loader,
    read_plan,
    run_row,
    touch,
    write_plan,
)
from resilience.settings import MmapSettings

MIB = 2**20
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
"""Of smaps: the line that a mapping begins with."""

Consumer = subprocess.Popen[str]


def measure(plan: Plan) -> figures.Measured:
    """Measure once: the kernel's counts are exact."""
    with fresh_folder(plan) as folder, contextlib.ExitStack() as stack:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.data_memory"]
        consumers = []
        for _ in range(plan.num_consumers):
            consumer = subprocess.Popen(
                [*command, write_plan(plan), "consumer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(consumer)
            stack.callback(consumer.kill)
            consumers.append(consumer)
        values = count(plan, folder, consumers)
        with open_loader(settings_of(plan), SOURCE) as loader:
            loader.close(is_over=True)
    return figures.Measured({name: [value / MIB] for name, value in values.items()})


def count(plan: Plan, folder: Path, consumers: Sequence[Consumer]) -> dict[str, int]:
    """Return bytes while all hold the same batches."""
    pids = [each.pid for each in consumers]
    wait_for(consumers)
    own = sum(read_own(pid) for pid in pids)
    let_on(consumers)
    wait_for(consumers)
    mapped = sum(read_mapped(pid, folder) for pid in [*pids, *find_producers(plan)])
    gained = sum(read_own(pid) for pid in pids) - own
    let_on(consumers)
    for each in consumers:
        if each.wait():
            raise SystemExit(f"a consumer ended with {each.returncode}")
    copy = plan.num_read * BATCH_BYTES
    return {figures.COPY: copy, figures.MAPPED: mapped, figures.GAINED: mapped + max(0, gained)}


def wait_for(consumers: Sequence[Consumer]) -> None:
    """Wait until all have said that they are there."""
    for each in consumers:
        assert each.stdout is not None
        if not each.stdout.readline():
            raise SystemExit("a consumer ended too early")


def let_on(consumers: Sequence[Consumer]) -> None:
    """Let all go on."""
    for each in consumers:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()


def read_own(pid: int) -> int:
    """Return a process's anonymous memory, private pages of mapped files among it."""
    return read_size(Path("/proc", str(pid), "smaps_rollup").read_text(), "Pss_Anon")


def read_mapped(pid: int, folder: Path) -> int:
    """Return the proportional set size of the files of a folder, deleted ones too."""
    total, is_counted = 0, False
    for line in Path("/proc", str(pid), "smaps").read_text().splitlines():
        if match := _MAPPING.fullmatch(line):
            is_counted = match[1].startswith(f"{folder}/")
        elif is_counted and line.startswith("Pss:"):
            total += read_size(line, "Pss")
    return total


def read_size(text: str, name: str) -> int:
    """Return a size by its name in smaps."""
    match = re.search(rf"^{name}: +(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0


SOURCE = make_source("counting", num_tokens=NUM_TOKENS)


def run_consumer(plan: Plan) -> None:
    """Read all batches and keep them, with stops before and after."""
    torch.set_num_threads(1)
    with open_loader(settings_of(plan), SOURCE) as loader:
        held = [loader.read(0)]
        touch(held[0])
        stop()
        held += [loader.read(number) for number in range(1, plan.num_read)]
        total = sum(touch(batch) for batch in held)
        check(total, expected_sum(range(plan.num_read)))
        stop()


def settings_of(plan: Plan) -> MmapSettings:
    """Return settings that let all of it stay."""
    return make_settings(plan.folder / "cache", checkpoint_frequency=plan.num_read)


def stop() -> None:
    """Say that we are there, and wait to be let on."""
    print("there", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the row ended")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_consumer(read_plan(sys.argv[1]))
    else:
        run_row(measure)

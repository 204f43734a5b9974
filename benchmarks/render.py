"""What rendering the 70B recipe for Kubernetes costs as a whole process.

Prints CPU seconds (user and system), wall seconds and peak memory, each the
median of seven runs after one warm-up, beside the cost of a process that only
imports the libraries that the launcher cannot do without.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 7
RECIPE = "llama/llama3_70b_pretrain_checkpointless"
COMMANDS = {
    "render 70B for Kubernetes": ["-m", "launcher", f"recipe={RECIPE}", "cluster=k8s"],
    "render 70B for Slurm": ["-m", "launcher", f"recipe={RECIPE}", "cluster=slurm"],
    "import the libraries alone": ["-c", "import hydra, omegaconf, pydantic, jinja2, yaml"],
    "python alone": ["-c", "pass"],
}


def measure(arguments: list[str], folder: Path) -> tuple[float, float, float]:
    """Run one process to its end and return (CPU seconds, wall seconds, peak MB)."""
    with tempfile.TemporaryFile("w+") as words:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=words
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            words.seek(0)
            raise SystemExit(f"{arguments} ended with {process.returncode}: {words.read()}")
    wall_s = time.perf_counter() - began
    return usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss / 1000


def main() -> None:
    """Measure each command in turn, round by round, and print a table of medians."""
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS + 1):
            for name, arguments in COMMANDS.items():
                figures[name].append(measure(arguments, Path(folder)))
    print(f"| command | CPU s | wall s | peak MB |  (medians of {RUNS}, {os.cpu_count()} cores)")
    print("|---|---|---|---|")
    for name, rows in figures.items():
        cpu_s, wall_s, peak_mb = (
            statistics.median(column) for column in zip(*rows[1:], strict=True)
        )
        print(f"| {name} | {cpu_s:.2f} | {wall_s:.2f} | {peak_mb:.0f} |")


if __name__ == "__main__":
    main()

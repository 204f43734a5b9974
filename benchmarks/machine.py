"""What machine a benchmark ran on, and whether it was idle enough to believe the figures."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options about load."""
    parser.add_argument(
        "--max-load",
        type=float,
        default=0.5,
        help="refuse to start above this load average of the last minute",
    )
    parser.add_argument(
        "--force-load",
        action="store_true",
        help="start all the same; for development, figures are then not worth keeping",
    )


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return what reads an option's names, with commas between."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return read


def write_json(path: Path | None, about: object, **values: Any) -> None:
    """Write figures, dataclasses among them, with the machine; nothing without a path."""
    if path:
        text = json.dumps({"machine": about, **values}, indent=1, default=dataclasses.asdict)
        path.write_text(text + "\n", "utf-8")


def describe_machine() -> dict[str, object]:
    """Return model, cores, kernel and load of this machine."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def check_load(arguments: argparse.Namespace) -> dict[str, object]:
    """Print the machine, and leave with an error if it is too busy.

    From then on SIGTERM ends this process in order, with all that it has started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    machine = describe_machine()
    print(" | ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    load = os.getloadavg()[0]
    if load > arguments.max_load:
        words = f"load {load:.2f} is above --max-load {arguments.max_load}"
        if not arguments.force_load:
            raise SystemExit(f"{words}; wait for an idle machine, or use --force-load")
        print(f"note: {words}: these figures are not worth keeping", flush=True)
    return machine

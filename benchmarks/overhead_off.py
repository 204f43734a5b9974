"""One worker of a real job without recovery, which notes what of recovery it has met anyway.

Run by `benchmarks.overhead` under a node agent: the trainer's own command line. Written to
off-RANK.json: modules of resilience, threads, and collectives by name.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from recipes_training.__main__ import main

COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


class CollectiveCounter(TorchDispatchMode):
    """Counts this thread's collectives; those of DDP's backward pass run in it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Count and go on."""
        if func.namespace in COLLECTIVES:
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def run_worker(arguments: list[str]) -> int:
    """Run the trainer's worker to its end and write what it has met."""
    run_dir = next(word.partition("=")[2] for word in arguments if word.startswith("--run-dir="))
    counter = CollectiveCounter()
    with counter:
        status = main(arguments)
    met = {
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "resilience"),
        "threads": [thread.name for thread in threading.enumerate()],
        "collectives": dict(counter.names),
    }
    Path(run_dir, f"off-{os.environ['RANK']}.json").write_text(json.dumps(met), "utf-8")
    return status


if __name__ == "__main__":
    worker_status = run_worker(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # As the trainer's own command line ends.
    os._exit(worker_status)

"""A worker's command line that writes down its modules of resilience, threads and collectives.

They go to met-RANK.json in the run's folder.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from recipes_training.__main__ import main


class CollectiveCounter(TorchDispatchMode):
    """Counts this thread's collectives; those of DDP's backward pass run in it as well."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    run_dir = next(word.partition("=")[2] for word in sys.argv if word.startswith("--run-dir="))
    with CollectiveCounter() as counter:
        status = main(sys.argv[1:])
    met = {
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "resilience"),
        "threads": [thread.name for thread in threading.enumerate()],
        "collectives": dict(counter.names),
    }
    Path(run_dir, f"met-{os.environ['RANK']}.json").write_text(json.dumps(met), "utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # As the trainer's own command line ends.
    os._exit(status)

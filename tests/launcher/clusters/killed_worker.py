"""A worker that says a word and trains; that of rank 1 is killed in step 1."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from recipes_training.__main__ import main

WORD = "a word of a worker"

if __name__ == "__main__":
    from recipes_training.torch.step import TorchStepper

    sys.stdout.write(f"{WORD}\n")
    sys.stdout.flush()
    compute = TorchStepper.compute

    def compute_or_die(stepper: TorchStepper, rows: Any, *, step: int) -> Any:
        if (os.environ["RANK"], step) == ("1", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(stepper, rows, step=step)

    TorchStepper.compute = compute_or_die  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))

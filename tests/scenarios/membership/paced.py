"""The training program, whose steps take a while until the test is in a hurry."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from recipes_training import __main__ as program
from recipes_training.loop import Loop

HURRY = "HURRY"
"""The variable with the path of a file; once that is there, nothing takes a while."""
STEP_S = "STEP_S"
"""The variable with the seconds that each step takes until then, at least."""


def pace() -> None:
    begin_step = Loop._begin_step

    def begin_in_time(loop: Loop, step: int, batches: Any) -> None:
        begin_step(loop, step, batches)
        if not Path(os.environ[HURRY]).exists():
            time.sleep(float(os.environ[STEP_S]))

    Loop._begin_step = begin_in_time  # type: ignore[method-assign]


if __name__ == "__main__":
    pace()
    program.run_and_exit()

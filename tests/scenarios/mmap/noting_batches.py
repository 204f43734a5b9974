"""`python -m recipes_training` that notes in TEST_NOTES how each of its ranks opens its batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recipes_training import loop
from recipes_training.__main__ import run_and_exit
from recipes_training.data.worker_batches import Batches

OPEN = loop.open_batches


def note(*parts: Any, waits_at_first: bool, **more: Any) -> Batches:
    with Path(os.environ["TEST_NOTES"]).open("a", encoding="utf-8") as file:
        file.write(f"{'waits' if waits_at_first else 'reads'} at step {more['first']}\n")
    return OPEN(*parts, waits_at_first=waits_at_first, **more)


if __name__ == "__main__":
    loop.open_batches = note
    run_and_exit()

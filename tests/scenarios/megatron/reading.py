"""The training program, whose producers of batches note what they read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes_training import __main__ as program
from recipes_training.data import batches
from resilience.data.sources import Source, Start

_make_source = batches.make_source


def note_reads(*arguments: Any) -> Source:
    """Return the job's source, which notes each batch that is made in the folder TEST_READS."""
    source = _make_source(*arguments)
    folder = {"folder": os.environ["TEST_READS"]}
    return replace(
        source, reference=f"{__name__}:produce", arguments={**source.arguments, **folder}
    )


def produce(start: Start, *, folder: str, **arguments: Any) -> Iterator[Any]:
    """Yield what the job's own source does, and note by data rank which batches were made."""
    for number, batch in enumerate(batches.produce(start, **arguments), start.batch):
        with Path(folder, f"{start.rank}of{start.size}").open("a") as file:
            file.write(f"{number}\n")
        yield batch


if __name__ == "__main__":
    # The producer imports the module under its own name.
    from tests.scenarios.megatron import reading

    batches.make_source = reading.note_reads
    program.run_and_exit()

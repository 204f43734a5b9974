"""A rank's part of each global batch, made ahead of the worker by a process of its own.

Nothing here imports torch: a producer of batches starts in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from launcher.job import TrainingJob
from launcher.job.workload import Data, StdlibText
from recipes_training.data.jsonl import map_token_file
from recipes_training.data.order import Split
from recipes_training.data.position import Position
from recipes_training.data.rank_batches import RankBatches
from recipes_training.data.stdlib_text import read_stdlib_tokens
from recipes_training.data.tokens import Samples, describe_samples
from resilience.data.sources import Source, Start

_DATA: TypeAdapter[Data] = TypeAdapter(Data)
ROWS = "rows"
"""Name under which a cached batch has its tokens."""


def make_source(job: TrainingJob, samples: Samples, position: Position) -> Source:
    """Return what makes a producer read the batches of a job whose worker has these samples."""
    trainer = job.trainer
    tokens = samples.tokens
    return Source(
        "recipes_training.data.batches:produce",
        {
            "data": job.data.model_dump(mode="json"),
            # Not looked for again: where the data came from may be out of reach by then.
            "token_file": str(tokens.filename) if isinstance(tokens, np.memmap) else None,
            "seed": trainer.seed,
            "global_batch_size": trainer.global_batch_size,
            "micro_batch_size": trainer.micro_batch_size,
            "first_step": position.step,
            "first_sample": position.sample,
        },
    )


def make_identity(job: TrainingJob, samples: Samples, position: Position) -> dict[str, Any]:
    """Return everything that a batch's content depends on, beside the rank and its source."""
    return {
        "data": job.data.model_dump(mode="json"),
        # Its text is the interpreter's own, of which the samples' description tells only a part.
        "python": python_version() if isinstance(job.data, StdlibText) else None,
        "samples": describe_samples(samples),
        "seed": job.trainer.seed,
        "global_batch_size": job.trainer.global_batch_size,
        "micro_batch_size": job.trainer.micro_batch_size,
        "model_parallel_size": job.trainer.model_parallel_size,
        "position": [position.step, position.sample],
    }


def produce(
    start: Start,
    *,
    data: Mapping[str, Any],
    token_file: str | None,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    first_step: int,
    first_sample: int,
) -> Iterator[dict[str, NDArray[np.int64]]]:
    """Yield a rank's batches from a step on, for ever; for a producer of `resilience.data`."""
    samples = _map_samples(_DATA.validate_python(data), token_file)
    split = Split(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=start.size,
        first_step=first_step,
        first_sample=first_sample,
    )
    batches = RankBatches(samples, seed=seed, split=split, rank=start.rank)
    step = start.batch
    while True:
        yield {ROWS: batches.read(step)}
        step += 1


def _map_samples(data: Data, token_file: str | None) -> Samples:
    """Return the samples that the worker has opened before."""
    if token_file is None:
        assert isinstance(data, StdlibText)
        tokens = read_stdlib_tokens(data.max_bytes)
    else:
        tokens = map_token_file(Path(token_file))
    return Samples(tokens=tokens, seq_length=data.seq_length)

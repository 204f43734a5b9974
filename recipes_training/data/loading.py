"""Opens a job's data in every worker; one worker tokenises for all who see its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.job import TrainingJob
from launcher.job.workload import Data, Model, StdlibText
from recipes_training.data.jsonl import (
    CACHE_FOLDER,
    JsonLines,
    find_token_file,
    map_token_file,
    open_encoder,
    write_token_file,
)
from recipes_training.data.position import Position, next_position, note_position, read_position
from recipes_training.data.stdlib_text import read_stdlib_tokens
from recipes_training.data.tokens import Samples, Tokens, describe_samples
from recipes_training.errors import DataError
from recipes_training.group import DATA_TIMEOUT, WorkerGroup
from recipes_training.plan import check_vocabulary

_FIRST = "tokens"


def open_samples(data: Data, model: Model, *, run_dir: Path, group: WorkerGroup) -> Samples:
    """Return the job's samples when all workers can read theirs."""
    if isinstance(data, StdlibText):
        tokens = read_stdlib_tokens(data.max_bytes)
    else:
        tokens = _open_jsonl(data, model, run_dir / CACHE_FOLDER, group)
    return Samples(tokens=tokens, seq_length=data.seq_length)


def _open_jsonl(data: JsonLines, model: Model, folder: Path, group: WorkerGroup) -> Tokens:
    """Rank 0 tokenises first: on a shared folder the other nodes find its file there."""
    of_node = _of_node(group)
    if group.rank == 0:
        with group.lead(_FIRST), group.lead(of_node):
            _tokenise(data, model, folder, group)
    else:
        group.follow(_FIRST, DATA_TIMEOUT)
        if group.local_rank == 0:
            with group.lead(of_node):
                _tokenise(data, model, folder, group)
        else:
            group.follow(of_node, DATA_TIMEOUT)
    return map_token_file(find_token_file(data, folder))


def _of_node(group: WorkerGroup) -> str:
    return f"{_FIRST}/{group.node}"


def _tokenise(data: JsonLines, model: Model, folder: Path, group: WorkerGroup) -> None:
    encode, num_tokens = open_encoder(data.tokenizer)
    check_vocabulary(model, num_tokens, data.tokenizer)
    path = find_token_file(data, folder)
    if not path.exists():
        write_token_file(data, path, node=group.node, encode=encode)


def announce_samples(data: Data, samples: Samples, group: WorkerGroup) -> None:
    """Let workers that were replaced open the samples as well; waits for nobody."""
    if group.rank == 0:
        group.first_text("samples", describe_samples(samples), DATA_TIMEOUT)
    if isinstance(data, StdlibText):
        return
    if group.rank == 0:
        with group.lead(_FIRST):
            pass
    if group.local_rank == 0:
        with group.lead(_of_node(group)):
            pass


def check_same_samples(samples: Samples, group: WorkerGroup) -> None:
    """Refuse samples that are not rank 0's: another copy of the file, another Python."""
    here = describe_samples(samples)
    if (first := group.first_text("samples", here, DATA_TIMEOUT)) != here:
        raise DataError(
            f"the data of {group.node} has {here}, that of worker 0 has {first}; "
            "give every node the same files and the same version of Python"
        )


def place_in_data(
    rest: dict[str, Any], samples: Samples, *, job: TrainingJob, step: int, node: str
) -> Position:
    """Note in `rest`, which goes with the state, which samples the steps from `step` on take.

    Raises DataError for data that have changed though the job says the same of them.
    """
    here = describe_samples(samples)
    batch = job.trainer.global_batch_size
    found = next_position(
        read_position(rest, batch=batch),
        step=step,
        batch=batch,
        samples=here,
        source=job.data.model_dump_json(),
    )
    if isinstance(found, str):
        raise DataError(
            f"the data of {node} has {here}, and the run began with {found}; leave the data as it "
            "is while a run goes on, or name other data: launcher continue RUN data.KEY=VALUE"
        )
    note_position(rest, found)
    return found

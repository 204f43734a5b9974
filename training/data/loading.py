"""Opens a job's data in every worker; one worker a node tokenises for its neighbours."""

from __future__ import annotations

from pathlib import Path

from launcher.job.workload import Data, Jsonl, Model
from training.data.jsonl import map_token_file, open_encoder, token_file, write_token_file
from training.data.stdlib_text import read_stdlib_tokens
from training.data.tokens import NUM_BYTE_TOKENS, Samples, Tokens
from training.errors import TrainingError
from training.group import WorkerGroup
from training.plan import check_vocabulary

CACHE_FOLDER = "cache"


def open_samples(data: Data, model: Model, *, run_dir: Path, group: WorkerGroup) -> Samples:
    """Return the job's samples when all workers can read theirs."""
    if isinstance(data, Jsonl):
        tokens = _open_jsonl(data, model, run_dir / CACHE_FOLDER, group)
    else:
        check_vocabulary(model, NUM_BYTE_TOKENS, "bytes")
        tokens = read_stdlib_tokens(data.max_bytes)
    return Samples(tokens=tokens, seq_length=data.seq_length)


def _open_jsonl(data: Jsonl, model: Model, folder: Path, group: WorkerGroup) -> Tokens:
    if group.environment.local_rank != 0:
        group.wait_for_node_leader("tokens")
        return map_token_file(token_file(data, folder))
    try:
        encode, num_tokens = open_encoder(data.tokenizer)
        check_vocabulary(model, num_tokens, data.tokenizer)
        path = token_file(data, folder)
        if not path.exists():
            write_token_file(data, path, node=group.node, encode=encode)
    except TrainingError as error:
        group.tell_node("tokens", problem=str(error))
        raise
    group.tell_node("tokens")
    return map_token_file(path)

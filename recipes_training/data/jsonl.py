"""JSON lines, tokenised once for all who see the folder into a file of its own.

The lines are those of a file, or of objects in S3. The token file lies in the
run's folder and is mapped, never read as a whole: data may be far larger than
memory, but not than the disk (4 bytes a token; one document has to fit into
memory). Its name holds a digest of everything that its content depends on; it
appears by rename, so a name that exists is complete, and a restarted run finds
it again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from launcher.job.workload import NUM_BYTE_TOKENS, Jsonl, S3Jsonl
from recipes_training.data.tokens import Line, Tokens, encode_bytes
from recipes_training.errors import DataError, first_line
from resilience.plain_files import read_plain_text
from resilience.whole_files import replace_text

CACHE_FOLDER = "cache"
"""Folder of token files in a run's own."""
_DOCUMENTS_PER_CALL = 256
_UNCHANGED = "leave the data as it is while a run begins"
_HALF = re.compile("[\ud800-\udfff]")
_TOKEN_TYPE = np.dtype("<u4")

Encoder = Callable[[list[str]], Iterable[Tokens]]
JsonLines = Jsonl | S3Jsonl


def token_file(data: JsonLines, folder: Path) -> Path:
    """Return where the tokens of the data are, or are to be.

    Reads only the status of the files, or a listing of the bucket.
    """
    content = _describe_file(data) if isinstance(data, Jsonl) else _describe_bucket(data)
    return folder / f"tokens-{_digest(data, *content)}.bin"


def find_token_file(data: JsonLines, folder: Path) -> Path:
    """Return the same; of a bucket, what `write_token_file` has noted in this folder.

    So who comes later to a run lists no bucket, which may be out of reach by then.
    """
    if isinstance(data, S3Jsonl):
        with suppress(FileNotFoundError):
            path = folder / read_plain_text(_note_of(data, folder))
            if path.exists():
                return path
    return token_file(data, folder)


def _note_of(data: S3Jsonl, folder: Path) -> Path:
    """Return the file that names the token file of a bucket's objects."""
    return folder / f"tokens-of-{_digest(data, data.url, data.endpoint)}.txt"


def _digest(data: JsonLines, *content: object) -> str:
    parts = (*content, data.text_key, data.tokenizer, _tokenizer_files(data.tokenizer))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _describe_file(data: Jsonl) -> tuple[str, int, int]:
    try:
        status = Path(data.path).stat()
    except OSError as error:
        raise DataError(
            f"cannot read data.path {data.path}: {(error.strerror or str(error)).lower()}"
        ) from error
    return data.path, status.st_size, status.st_mtime_ns


def _describe_bucket(data: S3Jsonl) -> tuple[str, str | None, list[tuple[str, int, str]]]:
    from recipes_training.data.s3 import describe_objects, list_objects

    return data.url, data.endpoint, describe_objects(list_objects(data))


def _tokenizer_files(tokenizer: str) -> list[tuple[str, int, int]]:
    """Return what tells one content of the tokenizer's folder from another."""
    if tokenizer == "bytes":
        return []
    files = sorted(path for path in Path(tokenizer).glob("*") if path.is_file())
    statuses = [(path.name, path.stat()) for path in files]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


def write_token_file(data: JsonLines, path: Path, *, node: str, encode: Encoder) -> None:
    """Tokenise all of the data; a name of its own a node keeps nodes apart on a shared disk.

    Raises DataError, also where the data is not what it was when `path` got its name.
    """
    unfinished = path.with_name(f"{path.name}.{node}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What a writer has left that was killed, and no link to another file.
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:
            _write_tokens(file, _read_texts(data), encode)
        if token_file(data, path.parent) != path:
            raise DataError(f"the data changed while it was read; {_UNCHANGED}")
        unfinished.replace(path)
        if isinstance(data, S3Jsonl):
            replace_text(_note_of(data, path.parent), path.name, node)
    except OSError as error:
        raise DataError(f"cannot write tokens to {unfinished}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def map_token_file(path: Path) -> Tokens:
    """Return the tokens as a memory map; raises DataError where there is no such file."""
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(
            f"no tokens at {path}: the data changed since they were written; {_UNCHANGED}"
        ) from error
    if num_bytes == 0:
        return np.empty(0, dtype=_TOKEN_TYPE)
    return np.memmap(path, dtype=_TOKEN_TYPE, mode="r")


def open_encoder(tokenizer: str) -> tuple[Encoder, int]:
    """Return the encoder and the number of its tokens; raises DataError."""
    if tokenizer == "bytes":
        return _encode_bytes, NUM_BYTE_TOKENS
    return _open_hugging_face(tokenizer)


def _write_tokens(file: BinaryIO, texts: Iterator[str], encode: Encoder) -> None:
    while batch := list(itertools.islice(texts, _DOCUMENTS_PER_CALL)):
        file.writelines(tokens.astype(_TOKEN_TYPE).tobytes() for tokens in encode(batch))
    file.flush()
    os.fsync(file.fileno())


def _encode_bytes(texts: list[str]) -> Iterator[Tokens]:
    return (encode_bytes(text.encode("utf-8", "surrogatepass")) for text in texts)


def _open_hugging_face(folder: str) -> tuple[Encoder, int]:
    if not Path(folder).is_dir():
        raise DataError(f"no folder at data.tokenizer {folder}")
    # transformers takes seconds to import, and bytes need nothing of it.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # what a broken folder raises is up to each tokenizer's class
        reason = first_line(error)
        raise DataError(f"data.tokenizer {folder} is no tokenizer: {reason}") from error
    if (end := tokenizer.eos_token_id) is None:
        raise DataError(f"data.tokenizer {folder} has no end-of-text token to divide documents")

    def encode(texts: list[str]) -> Iterator[Tokens]:
        # A document that spells a special token, such as the end of a text, is text all the same.
        encoded = tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return (np.array([*tokens, end], dtype=_TOKEN_TYPE) for tokens in encoded)

    return encode, len(tokenizer)


def _read_texts(data: JsonLines) -> Iterator[str]:
    lines = _read_file(data) if isinstance(data, Jsonl) else _read_bucket(data)
    for line in lines:
        if line.content.strip():
            text = _parse_text(line.content, data.text_key, line.where)
            # Bytes can hold such a half, and no other tokenizer takes it.
            if data.tokenizer != "bytes" and _HALF.search(text):
                raise DataError(
                    f"{line.where} holds half of a surrogate pair under data.text_key "
                    f"{data.text_key!r}; allowed: text that UTF-8 can write"
                )
            yield text


def _read_bucket(data: S3Jsonl) -> Iterator[Line]:
    # Here, as a run without S3 imports nothing of it.
    from recipes_training.data.s3 import read_lines

    return read_lines(data)


def _read_file(data: Jsonl) -> Iterator[Line]:
    try:
        with Path(data.path).open("rb") as file:
            for number, content in enumerate(file, start=1):
                yield Line(f"data.path {data.path}, line {number}", content)
    except OSError as error:
        raise DataError(f"cannot read data.path {data.path}: {error.strerror}") from error


def _parse_text(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where} has no text under data.text_key {key!r}")
    return text

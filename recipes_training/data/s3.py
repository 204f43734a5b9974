"""Lines of text in a bucket: objects of JSON lines below a prefix, in the order of their keys.

Only who reads objects imports s3torchconnector, because that imports torch; what a listing
says is found without it. A stream is read block by block, so an object may be larger than memory.
Credentials come from where the AWS clients look for them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from launcher.job.workload import S3Jsonl
from recipes_training.data.tokens import Line
from recipes_training.errors import DataError
from resilience.tiered.errors import TierError
from resilience.tiered.stores.deadline import Calls, Hung
from resilience.tiered.stores.s3 import S3Objects, S3Settings

_REGION = "us-east-1"
_BLOCK_BYTES = 8 << 20
_ATTEMPTS = 5
_LISTING_DEADLINE_S = 600.0
"""For all pages of a listing, a thousand objects each."""
_BLOCK_DEADLINE_S = 120.0


class S3Object(NamedTuple):
    """An object as S3MapDataset is given it; `object_info` is the listing's own."""

    bucket: str
    key: str
    object_info: Any


def list_objects(data: S3Jsonl) -> list[S3Object]:
    """Return the objects that are not empty, in the order of their keys; raises DataError."""
    bucket, _, prefix = data.url.removeprefix("s3://").partition("/")
    settings = S3Settings(
        bucket=bucket,
        region=data.region or _REGION,
        endpoint=data.endpoint,
        force_path_style=data.path_style,
        attempts=_ATTEMPTS,
    )

    def find() -> list[S3Object]:
        pages = S3Objects(settings).native_client().list_objects(bucket, prefix)
        return [
            S3Object(bucket, each.key, each)
            for page in pages
            for each in page.object_info
            if each.size
        ]

    with _calls(f"data.url {data.url}", _LISTING_DEADLINE_S) as calls:
        objects = calls.call(find)
    if not objects:
        raise DataError(f"data.url {data.url} has no object with text; give a prefix of some keys")
    # As S3 itself lists them; other servers have been seen to know better.
    return sorted(objects, key=lambda each: each.key.encode())


def describe_objects(objects: list[S3Object]) -> list[tuple[str, int, str]]:
    """Return what tells one content of the objects from another."""
    return [(each.key, each.object_info.size, each.object_info.etag) for each in objects]


def read_lines(data: S3Jsonl) -> Iterator[Line]:
    """Yield the lines of all objects; raises DataError."""
    objects = list_objects(data)
    dataset = _open_dataset(data, objects)
    for number, each in enumerate(objects):
        where = f"data.url s3://{each.bucket}/{each.key}"
        with _calls(where, _BLOCK_DEADLINE_S) as calls:
            reader = _Blocks(calls, calls.call(dataset.__getitem__, number))
            lines = io.BufferedReader(reader, _BLOCK_BYTES)
            for count, content in enumerate(lines, start=1):
                yield Line(f"{where}, line {count}", content)


class _Blocks(io.RawIOBase):
    """An S3Reader of which each block is read within a deadline."""

    def __init__(self, calls: Calls, reader: Any) -> None:
        self._calls = calls
        self._reader = reader

    def readable(self) -> bool:
        """Say that it is read from."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something; 0 at the end."""
        self._calls.renew()
        # Not into the buffer: a call that hangs may write when the buffer is gone.
        block: bytes = self._calls.call(self._reader.read, len(buffer))
        buffer[: len(block)] = block
        return len(block)


def _open_dataset(data: S3Jsonl, objects: list[S3Object]) -> Any:
    try:
        connector = import_module("s3torchconnector")
    except ImportError as error:
        raise DataError(f"data.kind 's3_jsonl' needs the package's extra s3: {error}") from error
    return connector.S3MapDataset(
        data.region or _REGION,
        lambda client: objects,
        endpoint=data.endpoint,
        s3client_config=connector.S3ClientConfig(
            force_path_style=data.path_style, max_attempts=_ATTEMPTS
        ),
        # Without a buffer: the blocks are asked for as they are read.
        reader_constructor=connector.S3ReaderConstructor.range_based(buffer_size=0),
    )


@contextmanager
def _calls(what: str, deadline_s: float) -> Iterator[Calls]:
    """Give calls that end at a deadline, and whose failures are the data's."""
    try:
        with closing(Calls(f"cannot read {what}", deadline_s, Hung())) as calls:
            yield calls
    except TierError as error:
        raise DataError(str(error)) from error

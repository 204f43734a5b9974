"""Stores for the tests: where they are, what is put into them, and a writer that is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash

from resilience.tiered.shard import (
    PIECE_BYTES,
    ShardId,
    ShardMeta,
    content_digest,
    piece_bounds,
)
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.stores.objects import Objects
from resilience.tiered.stores.s3 import S3Settings, open_s3
from resilience.tiered.stores.store import Store
from tests.resilience.tiered.s3_server import ENVIRONMENT, S3Server

_NUMBERS = count(1)


@dataclass(frozen=True)
class Place:
    """A store that any process can open."""

    kind: str
    settings: dict[str, Any]

    def open(self, **changed: Any) -> Store:
        settings = {**self.settings, **changed}
        if self.kind == "folder":
            return open_folder(FolderSettings(**{**settings, "folder": Path(settings["folder"])}))
        return open_s3(S3Settings(**settings))

    def objects(self) -> Objects:
        return self.open()._objects


def s3_place(server: S3Server, **changed: Any) -> Place:
    """Return a store in a new bucket."""
    bucket = f"bucket-{next(_NUMBERS)}"
    server.make_bucket(bucket)
    settings = {"bucket": bucket, "prefix": "/runs/a b/", "part_size_mib": 5, "attempts": 3}
    return Place("s3", {**settings, "endpoint": server.endpoint, **changed})


@dataclass(frozen=True)
class Shard:
    """A shard with its bytes."""

    meta: ShardMeta
    data: bytes

    @property
    def digest(self) -> str:
        return content_digest(self.meta)

    def pieces(self) -> list[memoryview]:
        return [memoryview(self.data)[begin:end] for begin, end in piece_bounds(len(self.data))]

    def put_data(self, store: Store) -> bool:
        return store.put_data(self.meta.id.namespace, self.digest, len(self.data), self.pieces())

    def put(self, store: Store) -> bool:
        is_sent = self.put_data(store)
        store.put_meta(self.meta)
        return is_sent

    def get(self, store: Store) -> bytes:
        into = bytearray(len(self.data))
        namespace = self.meta.id.namespace
        store.get_data(namespace, self.digest, len(self.data), memoryview(into))
        return bytes(into)


def make_shard(
    seed: int = 0,
    *,
    num_bytes: int = 1000,
    namespace: str = "job",
    step: int = 1,
    generation: int = 0,
    shard: str = "0",
    num_shards: int = 1,
) -> Shard:
    """Return a shard whose bytes come from its seed and size alone."""
    word = xxhash.xxh3_128_digest(f"{seed}/{num_bytes}".encode())
    data = (word * (num_bytes // len(word) + 1))[:num_bytes]
    meta = ShardMeta(
        id=ShardId(namespace=namespace, step=step, generation=generation, shard=shard),
        num_shards=num_shards,
        num_bytes=num_bytes,
        tensors=(),
        checksums=tuple(
            xxhash.xxh3_64_intdigest(data[begin:end]) for begin, end in piece_bounds(num_bytes)
        ),
        rest={"seed": seed},
    )
    return Shard(meta, data)


def big_shard() -> Shard:
    """Return the shard that the killed writer writes."""
    return make_shard(7, num_bytes=3 * PIECE_BYTES + 5)


def write_forever(place: Place, told: Connection) -> None:
    """Put all but the last piece of the big shard, say so, and wait to be killed."""
    os.environ.update(ENVIRONMENT)  # the server of these processes may have been forked before
    shard = big_shard()

    def pieces() -> Iterator[memoryview]:
        yield from shard.pieces()[:-1]
        told.send("half")
        told.recv()

    place.open().put_data("job", shard.digest, len(shard.data), pieces())

"""A rank of a job: saves and loads known bytes as it is told, one order after the other."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import HeldError, TieredError
from resilience.tiered.shard import ShardId, piece_bounds
from tests.resilience.tiered.daemons import make_meta

COPIES_MAX = 8
LOAD_TIMEOUT_S = 60.0


def make_bytes(shard_id: ShardId, num_bytes: int) -> bytes:
    """Return the bytes of a shard: no others are the same, and no part is like another."""
    words = (shard_id.namespace, shard_id.step, shard_id.generation, shard_id.shard)
    return random.Random(repr(words)).randbytes(num_bytes)


def read_id(client: TieredClient, order: dict[str, Any]) -> ShardId:
    return ShardId(
        namespace=client.namespace,
        step=order["step"],
        generation=order["generation"],
        shard=order["shard"],
    )


def save(client: TieredClient, order: dict[str, Any], orders: Connection) -> dict[str, Any]:
    """Save a shard; with `halt`, say so when half of it is written, and wait for the end."""
    shard_id, num_bytes = read_id(client, order), order["num_bytes"]
    content = make_bytes(shard_id, num_bytes)
    try:
        draft = client.begin(
            step=shard_id.step,
            generation=shard_id.generation,
            shard=shard_id.shard,
            num_shards=order["num_shards"],
            num_bytes=num_bytes,
        )
    except HeldError:  # a replica of this rank was faster
        return {}
    with draft:
        if order.get("halt"):
            draft.memory[: num_bytes // 2] = content[: num_bytes // 2]
            orders.send({"halted": True})
            orders.recv()
        draft.memory[:] = content
        draft.commit(make_meta(shard_id, content, num_shards=order["num_shards"]))
    return {}


def load(client: TieredClient, order: dict[str, Any]) -> dict[str, Any]:
    """Load a shard as a reader has to: what is not intact is given back, and asked for again."""
    shard_id = read_id(client, order)
    for num_bad in range(COPIES_MAX):
        with client.read(
            step=shard_id.step,
            generation=shard_id.generation,
            shard=shard_id.shard,
            timeout_s=LOAD_TIMEOUT_S,
        ) as loan:
            content = bytes(loan.memory)
            bounds = piece_bounds(len(content))
            checksums = tuple(xxhash.xxh3_64_intdigest(content[a:b]) for a, b in bounds)
            if checksums == loan.meta.checksums:
                digest = xxhash.xxh3_128_hexdigest(content)
                return {"digest": digest, "source": loan.source, "num_bad": num_bad}
            loan.bad()
    raise KeyError("no copy is intact")


def steps(client: TieredClient, order: dict[str, Any]) -> dict[str, Any]:
    rows = client.steps()
    return {"steps": [[each.step, each.generation, list(each.shards)] for each in rows]}


def serve(orders: Connection, path: str, namespace: str) -> None:
    """Do what the other end orders, and answer, until it ends."""
    acts = {"save": partial(save, orders=orders), "load": load, "steps": steps}
    with TieredClient(Path(path), namespace=namespace, job="job") as client, suppress(EOFError):
        while order := orders.recv():
            try:
                orders.send(acts[order["op"]](client, order))
            except (TieredError, KeyError, ValueError) as error:
                orders.send({"error": type(error).__name__, "text": str(error)})

"""AWS's client alone against a door, without torch; runs in AWS's environment.

usage: aws_probe.py URL FILE    writes what each call came to as JSON
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
    InMemoryCheckpointClient,
)

BODY = bytes(range(256)) * 40_000


class Probe:
    def __init__(self, url: str) -> None:
        self.url = url
        self.results: dict[str, Any] = {}

    def client(
        self, namespace: str = "probe", rank: int = 0, world_size: int = 2, **config: Any
    ) -> InMemoryCheckpointClient:
        return InMemoryCheckpointClient(
            namespace,
            str(rank),
            str(world_size),
            config=InMemoryClientConfig(base_url=self.url, **config),
        )

    def note(self, name: str, call: Callable[[], Any]) -> None:
        """Keep what a call returns, a body as its length, or the name of its error."""
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - what it is, is the result
            result = type(error).__name__
        if isinstance(result, bytes):
            result = [len(result), result == BODY]
        self.results[name] = result


def namespaces(probe: Probe) -> None:
    client = probe.client()
    probe.note("config of none", client.get_namespace_config)
    probe.note("put without namespace", lambda: client.put_checkpoint(1, b"x"))
    probe.note("latest of none", client.get_latest_checkpoints)
    probe.note("made", client.get_or_create_namespace)
    probe.note("again", client.get_or_create_namespace)
    probe.note("config", client.get_namespace_config)
    probe.note("latest of nothing", client.get_latest_checkpoints)
    probe.note("missing shard", lambda: client.get_checkpoint(1))
    probe.note("bad name", probe.client("a b").get_or_create_namespace)


def shards(probe: Probe, file: str) -> None:
    client = probe.client()
    for rank in range(2):
        own = probe.client(rank=rank)
        probe.note(f"put {rank}", lambda own=own: own.put_checkpoint(7, BODY))
    probe.note("latest without metadata", client.get_latest_checkpoints)
    probe.note("put metadata", lambda: client.put_checkpoint(7, b"meta", metadata_index=0))
    probe.note("latest", client.get_latest_checkpoints)
    probe.note("get", lambda: client.get_checkpoint(7))
    probe.note("get of another rank", lambda: client.get_checkpoint(7, rank=1))
    probe.note("get metadata", lambda: len(client.get_checkpoint(7, metadata_index=0)))
    probe.note("put file", lambda: client.put_checkpoint(8, file))
    probe.note("get file", lambda: client.get_checkpoint(8))
    probe.note("put nothing", lambda: client.put_checkpoint(9, b""))
    probe.note("get nothing", lambda: client.get_checkpoint(9))


def retention(probe: Probe) -> None:
    client = probe.client("kept")
    client.get_or_create_namespace()
    for step in range(1, 6):
        for rank in range(3):
            client.put_checkpoint(step, BODY[step:], rank=rank)
    probe.note("kept", lambda: client.get_latest_checkpoints(limit=10))
    probe.note("kept, two", lambda: client.get_latest_checkpoints(limit=2))
    probe.note("dropped", lambda: client.get_checkpoint(2))
    probe.note("delete", lambda: client.delete_checkpoint(5))
    probe.note("deleted", lambda: client.get_checkpoint(5))
    probe.note("latest after delete", client.get_latest_checkpoints)
    probe.note("delete namespace", client.delete_namespace)
    probe.note("config of deleted", client.get_namespace_config)
    probe.note("reset", client.reset_cluster)
    probe.note("after reset", probe.client().get_namespace_config)


def main() -> None:
    logging.disable(logging.CRITICAL)
    probe = Probe(sys.argv[1])
    namespaces(probe)
    shards(probe, sys.argv[2])
    retention(probe)
    json.dump(probe.results, sys.stdout)


if __name__ == "__main__":
    main()

"""Ranks that save and load with AWS's writer and reader; runs in AWS's environment.

usage: aws_worker.py STORE_FILE IN OUT [IN OUT]...    with two descriptors for each rank

The ranks are forked once all is imported, which takes seconds. Each takes commands as JSON lines
and answers each with one. The client itself is as it comes: its
requests reach the door because that is named as their proxy.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
    SageMakerCheckpointConfig,
)
from aws_state import State, is_equal, make_state
from torch.distributed.checkpoint.api import CheckpointException

LIFE_S = 500


def quiet_logger(namespace: str) -> logging.Logger:
    """Return a logger that their package adds no file to: it looks for this very one."""
    logger = logging.getLogger(f"aws.{namespace}")
    logger.setLevel(logging.CRITICAL + 1)
    if not logger.handlers:
        path = f"/var/log/sagemaker_checkpointing/{namespace}_checkpointing.log"
        logger.addHandler(logging.FileHandler(path, delay=True))
    return logger


def configure(command: dict[str, Any]) -> SageMakerCheckpointConfig:
    url = InMemoryClientConfig().base_url
    if "endpoint" in command:
        # The client of S3 would go by way of a proxy, too.
        os.environ.pop("http_proxy", None)
        os.environ["AWS_ENDPOINT_URL"] = command["endpoint"]
        url = command["url"]
    else:
        os.environ["http_proxy"] = command["url"]
    timeout_s, retries = command.get("timeout_s", 60.0), command.get("retries", 0)
    # No setting leads there from the writer and reader.
    InMemoryClientConfig.__init__.__defaults__ = (url, timeout_s, retries, 0.1, True)
    namespace = command["namespace"]
    base = command.get("s3")
    return SageMakerCheckpointConfig(
        namespace=namespace,
        world_size=dist.get_world_size(),
        logger=quiet_logger(namespace),
        save_to_s3=base is not None,
        s3_tier_base_path=base or "",
    )


def save(command: dict[str, Any]) -> State:
    state = make_state(dist.get_rank(), command["seed"])
    writer = SageMakerTieredStorageWriter(configure(command), step=command["step"])
    if command.get("is_async"):
        dcp.async_save(state, storage_writer=writer).result()
    else:
        dcp.save(state, storage_writer=writer)
    return {}


def load(command: dict[str, Any]) -> State:
    expected = make_state(dist.get_rank(), command["seed"])
    state = make_state(dist.get_rank(), 0)
    reader = SageMakerTieredStorageReader(configure(command), step=command.get("step"))
    dcp.load(state, storage_reader=reader)
    return {"step": reader.step, "is_equal": is_equal(expected, state)}


def main() -> None:
    store_file, *files = sys.argv[1:]
    pairs = list(zip(map(int, files[::2]), map(int, files[1::2]), strict=True))
    for rank, pair in enumerate(pairs):
        if not os.fork():
            for number, file in enumerate(pair):
                os.dup2(file, number)
            for file in map(int, files):
                os.close(file)
            run_rank(rank, len(pairs), store_file)
            return
    for file in map(int, files):
        os.close(file)
    for _ in pairs:
        os.wait()


def run_rank(rank: int, world_size: int, store_file: str) -> None:
    signal.alarm(LIFE_S)
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        os.environ.pop(name, None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_file, world_size), rank=rank, world_size=world_size
    )
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"save": save, "load": load}[command["do"]](command)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - what it is, is the result
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

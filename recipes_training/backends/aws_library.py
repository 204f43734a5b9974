"""AWS's own library, and what its reader keeps to itself: that it could not look for steps.

The library answers a daemon or a bucket that fails as it does an empty one. Whoever
believes that begins a run anew, or from an older step, and writes over what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from recipes_training.errors import TrainingError

PACKAGE = "amzn-sagemaker-checkpointing"
STEPS_MAX = 16
"""How many steps are looked for in each tier."""

_METADATA = "metadata.metadata"
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class Library:
    """The classes of the library that a run uses."""

    writer: Any
    reader: Any
    config: Any


def open_library() -> Library:
    """Return the library; raises TrainingError where this node lacks it."""
    try:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
            SageMakerTieredStorageReader,
            SageMakerTieredStorageWriter,
        )
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import (
            SageMakerCheckpointConfig,
        )
    except ImportError as error:
        raise TrainingError(
            f"resilience.tiered.backend 'aws' needs the package {PACKAGE}, with boto3, tenacity "
            f"and s3torchconnector, which it does not name itself: {error}; install them, or set "
            "resilience.tiered.backend to memoryd"
        ) from error
    return Library(
        SageMakerTieredStorageWriter, SageMakerTieredStorageReader, SageMakerCheckpointConfig
    )


def find_steps(reader: Any) -> list[int]:
    """Return the newest steps that the daemon or S3 has, newest first.

    `reader` is the library's, for no step. Raises whatever its tiers do that cannot be
    asked, OSError and the errors of requests and boto3 among it.
    """
    return sorted({*_steps_in_memory(reader.client), *_steps_in_store(reader)}, reverse=True)


def _steps_in_memory(client: Any) -> list[int]:
    path = client.LATEST_CHECKPOINTS_PATH.format(namespace=client.namespace)
    answer = import_module("requests").get(
        f"{client.config.base_url}{path}",
        params={"limit": STEPS_MAX},
        timeout=client.config.request_timeout,
    )
    if answer.status_code == _NOT_FOUND:
        return []
    answer.raise_for_status()
    return [int(step) for step in answer.json()]


def _steps_in_store(reader: Any) -> list[int]:
    """Return the steps whose metadata is in S3; it is written last."""
    if reader.s3_strategy is None:
        return []
    client = import_module("boto3").client("s3", region_name=reader.region)
    try:
        return list(islice(_whole_steps(client, reader), STEPS_MAX))
    finally:
        client.close()


def _whole_steps(client: Any, reader: Any) -> Iterator[int]:
    strategy, namespace = reader.s3_strategy, reader.checkpoint_config.namespace
    bucket, _, prefix = strategy.base_path.removeprefix("s3://").partition("/")
    pages = client.get_paginator("list_objects_v2")
    # Of rank 0 alone: another number of ranks may have saved.
    found = strategy.find_step_ranks(pages, bucket, prefix, namespace, 1)
    for step in sorted(found, reverse=True):
        uri = strategy.get_s3_uri(namespace, 0, step, _METADATA)
        name = uri.removeprefix(f"s3://{bucket}/")
        if client.list_objects_v2(Bucket=bucket, Prefix=name, MaxKeys=1)["KeyCount"]:
            yield step

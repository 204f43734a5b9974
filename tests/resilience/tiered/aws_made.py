"""A checkpoint in the format of AWS's library, made without it."""

from __future__ import annotations

import io
import pickle
import sys
import types
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

MODULE = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"
NUM_RANKS = 4
REST = {"seed": 7, "names": ["a", "b"]}


@dataclass
class _SageMakerStorageInfo:
    rank: int
    offset: int
    length: int


def make_rows(seed: int) -> Tensor:
    """Return a tensor of which each rank saves two rows."""
    return torch.rand(2 * NUM_RANKS, 3, generator=torch.Generator().manual_seed(seed))


def make_checkpoint(seed: int = 1, rest: Any = REST) -> list[bytes]:
    """Return the blob of each rank, and last the metadata."""
    rows, places, blobs = make_rows(seed), {}, []
    chunks = []
    for rank in range(NUM_RANKS):
        blob, begin = io.BytesIO(), torch.Size([2 * rank, 0])
        torch.save(rows[2 * rank : 2 * rank + 2].clone(), blob)
        info = _SageMakerStorageInfo(rank, 0, blob.tell())
        places[MetadataIndex("rows", begin, rank)] = info
        chunks.append(ChunkStorageMetadata(begin, torch.Size([2, 3])))
        if rank == 1:
            blob.write(content := save(rest))
            places[MetadataIndex("rest")] = _SageMakerStorageInfo(1, info.length, len(content))
        blobs.append(blob.getvalue())
    metadata = Metadata(
        state_dict_metadata={
            "rows": TensorStorageMetadata(
                TensorProperties.create_from_tensor(rows), rows.size(), chunks
            ),
            "rest": BytesStorageMetadata(),
        },
        planner_data={"rows": ("rows",), "rest": ("rest",)},
        storage_data=places,
        storage_meta=StorageMeta(),
    )
    return [*blobs, dump(metadata)]


def save(value: Any) -> bytes:
    """Return what DCP makes of what is no tensor."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def dump(metadata: Any) -> bytes:
    """Pickle as AWS's library does."""
    module = types.ModuleType(MODULE)
    module._SageMakerStorageInfo = _SageMakerStorageInfo  # type: ignore[attr-defined]
    names = MODULE.split(".")
    parents = {".".join(names[:at]): types.ModuleType("parent") for at in range(1, len(names))}
    with (
        patch.dict(sys.modules, {**parents, MODULE: module}),
        patch.object(_SageMakerStorageInfo, "__module__", MODULE),
    ):
        return pickle.dumps(metadata, protocol=pickle.HIGHEST_PROTOCOL)

"""DCP's metadata as JSON: what torch pickles, without a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA = "metadata"
"""Name of the shard that makes a step whole."""

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlace:
    """Where an item lies."""

    shard: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without `torch.`."""


def encode_metadata(metadata: Metadata, places: Mapping[MetadataIndex, ItemPlace]) -> bytes:
    """Return metadata and places as JSON.

    Raises ValueError for a planner's data that is not what torch's own planner makes:
    names, each with the keys and indices that lead to it.
    """
    content = {
        "format": _FORMAT,
        "tensors": {
            name: _encode_tensor(each) for name, each in metadata.state_dict_metadata.items()
        },
        "paths": _encode_paths(metadata.planner_data),
        "items": [
            [
                *(index.fqn, None if index.offset is None else list(index.offset), index.index),
                *(place.shard, place.offset, place.num_bytes, list(place.shape), place.dtype),
            ]
            for index, place in places.items()
        ],
        "storage": _encode_storage(metadata),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_metadata(text: bytes) -> Metadata:
    """Read metadata back, its `storage_data` a dict of ItemPlace; ValueError for what is none."""
    try:
        content = _check_format(json.loads(text))
        paths = content["paths"]
        return Metadata(
            state_dict_metadata={
                name: _decode_tensor(each) for name, each in content["tensors"].items()
            },
            planner_data=None if paths is None else {k: tuple(v) for k, v in paths.items()},
            storage_data=dict(_decode_item(each) for each in content["items"]),
            **_decode_storage(content.get("storage", {})),
        )
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"no metadata of a checkpoint: {error}") from error


def _encode_storage(metadata: Metadata) -> dict[str, Any]:
    """Return who saved what, and torch's version of the format where it has one."""
    storage = metadata.storage_meta or StorageMeta()
    return {
        "checkpoint_id": None if storage.checkpoint_id is None else str(storage.checkpoint_id),
        "save_id": storage.save_id,
        "modules": list(storage.modules),
        "version": getattr(metadata, "version", None),
    }


def _decode_storage(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields of the metadata that its version of torch has."""
    storage = StorageMeta(
        checkpoint_id=content.get("checkpoint_id"),
        save_id=content.get("save_id"),
        modules=list(content.get("modules", ())),
    )
    found = {"storage_meta": storage, "version": content.get("version")}
    return {each.name: found[each.name] for each in fields(Metadata) if each.name in found}


def _check_format(content: Any) -> Any:
    if content["format"] != _FORMAT:
        raise ValueError("another format")
    return content


def _encode_tensor(each: TensorStorageMetadata | BytesStorageMetadata) -> Any:
    if isinstance(each, BytesStorageMetadata):
        return None
    properties = each.properties
    return {
        "dtype": str(properties.dtype).removeprefix("torch."),
        "requires_grad": properties.requires_grad,
        "size": list(each.size),
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in each.chunks],
    }


def _decode_tensor(each: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if each is None:
        return BytesStorageMetadata()
    dtype = getattr(torch, each["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{each['dtype']!r:.40} is no type of a tensor")  # noqa: TRY004 - a value
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype, requires_grad=bool(each["requires_grad"])),
        size=torch.Size(each["size"]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in each["chunks"]
        ],
    )


def _encode_paths(paths: Any) -> dict[str, list[str | int]] | None:
    if paths is None:
        return None
    if not isinstance(paths, Mapping):
        kind = type(paths).__name__
        raise ValueError(f"data of a planner of type {kind} would need a pickle")  # noqa: TRY004
    for name, path in paths.items():
        if not isinstance(name, str) or not all(type(each) in (str, int) for each in path):
            raise ValueError(f"the path of {name!r:.80}, {path!r:.80}, would need a pickle")
    return {name: list(path) for name, path in paths.items()}


def _decode_item(row: Sequence[Any]) -> tuple[MetadataIndex, ItemPlace]:
    name, offset, number, shard, begin, num_bytes, shape, dtype = row
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    place = ItemPlace(
        shard=shard, offset=begin, num_bytes=num_bytes, shape=tuple(shape), dtype=dtype
    )
    return index, place

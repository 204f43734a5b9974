"""Writes tensors as a safetensors file, in pieces between which the writer can be stopped.

The library's own writer returns when all is written. A worker of a large model on a slow disk
would hear of a broken generation minutes too late, and be taken for one that is stuck.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from resilience.state.view import NamedTensor

PIECE_BYTES = 64 << 20
"""How much is written, and is on the disk, before the writer looks up."""

_ALIGNMENT_BYTES = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path,
    tensors: Sequence[NamedTensor],
    *,
    metadata: Mapping[str, str],
    on_piece: Callable[[], None],
) -> None:
    """Write a file that is on the disk when this returns.

    `on_piece` is called before each piece; what it raises leaves a part of a file. Raises
    OSError, and ValueError for a type that the format does not have.
    """
    with path.open("wb") as file:
        file.write(_make_header(tensors, metadata))
        for each in tensors:
            content = _bytes_of(each.tensor)
            for begin in range(0, len(content), PIECE_BYTES):
                on_piece()
                file.write(content[begin : begin + PIECE_BYTES])
                file.flush()
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())


def _make_header(tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for each in tensors:
        begin, end = end, end + each.tensor.nbytes
        if each.tensor.dtype not in _NAMES:
            raise ValueError(f"{each.name} has type {each.tensor.dtype}, which safetensors has not")
        fields[each.name] = {
            "dtype": _NAMES[each.tensor.dtype],
            "shape": list(each.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data

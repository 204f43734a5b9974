"""Segments for tests: batches that say which they are, and what stands for encryption."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resilience.data.errors import DamagedBatchError
from resilience.data.format import Buffer, file_bytes, record_bytes
from resilience.data.segments import Sealer, SegmentReader, SegmentWriter
from resilience.data.tree import TreeReader, flatten

LIMIT_S = 60
FINGERPRINT = bytes(range(32))


def make_batch(number: int) -> dict[str, Any]:
    return {
        "tokens": torch.arange(100).reshape(4, 25) + number,
        "scale": torch.full((3,), number, dtype=torch.bfloat16),
        "mask": np.arange(7) == number % 7,
        "nothing": torch.empty(0, 5),
        "number": number,
        "name": f"batch {number}",
    }


def is_batch(batch: dict[str, Any], number: int) -> bool:
    return flatten(batch)[0] == flatten(make_batch(number))[0] and all(
        one.tobytes() == other.tobytes()
        for one, other in zip(flatten(batch)[1], flatten(make_batch(number))[1], strict=True)
    )


def create(
    folder: Path, *, serial: int = 1, first: int = 0, room: int = 8, sealer: Sealer | None = None
) -> SegmentWriter:
    size = record_bytes(*flatten(make_batch(10**6)), is_sealed=sealer is not None)
    return SegmentWriter.create(
        folder,
        serial,
        first,
        FINGERPRINT,
        num_entries=room,
        num_bytes=file_bytes(room, size),
        sealer=sealer,
    )


def append(writer: SegmentWriter, *numbers: int) -> None:
    for each in numbers:
        assert writer.append(each, *flatten(make_batch(each)))


def write(folder: Path, *numbers: int, serial: int = 1, sealer: Sealer | None = None) -> Path:
    with create(folder, serial=serial, first=numbers[0], sealer=sealer) as writer:
        append(writer, *numbers)
    return writer.path


def read(segment: SegmentReader, number: int) -> dict[str, Any]:
    description, payload = segment.read(number)
    batch: dict[str, Any] = TreeReader(description).build(payload)
    return batch


def count_intact(segment: SegmentReader) -> int:
    """Return how many batches from the first on are undamaged."""
    for number in segment.numbers:
        try:
            segment.read(number)
        except DamagedBatchError:
            return number - segment.first
    return segment.published()


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << position % 8]))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class MirrorSealer:
    """Stands for encryption: reverses the bytes and knows what they were bound to."""

    def __init__(self, key: bytes = b"key") -> None:
        self.key = key

    def seal(self, parts: Iterable[Buffer], associated: bytes) -> bytes:
        return self._tag(associated) + b"".join(parts)[::-1]

    def is_current(self) -> bool:
        return True

    def open(self, data: Buffer, associated: bytes) -> bytearray:
        if data[:16] != self._tag(associated):
            raise DamagedBatchError("of another key")
        return bytearray(data[16:])[::-1]

    def _tag(self, associated: bytes) -> bytes:
        return hashlib.sha256(self.key + associated).digest()[:16]

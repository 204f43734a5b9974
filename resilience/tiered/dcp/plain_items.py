"""What `torch.save` has written, if it is tensors and plain data: read without running anything."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from resilience.tiered.errors import FormatError


def check_plain(item: bytes, *, checks: bool = False) -> None:
    """Raise FormatError for what `torch.save` has made of more than tensors and plain data."""
    load_plain(item, checks=checks)


def load_plain(item: bytes, *, checks: bool = False) -> Any:
    """Return what `torch.save` has made of tensors and plain data; FormatError for anything else.

    `checks` compares it with the CRC-32 that it brings along, which torch does not.
    """
    try:
        if fault := _find_fault(item, checks=checks):
            raise FormatError(f"no plain data: {fault}")  # noqa: TRY301
        return torch.load(io.BytesIO(item), map_location="cpu", weights_only=True)
    except (FormatError, MemoryError):
        raise
    except Exception as error:  # torch raises what it likes
        first_line = str(error).partition("\n")[0]
        raise FormatError(f"no plain data: {first_line:.200}") from error


def _find_fault(item: bytes, *, checks: bool) -> str | None:
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
            return "it is compressed, and could become any number of bytes"
        if checks and (name := archive.testzip()):
            return f"{name} is not what its checksum says"
    return None

"""What the content of a cache depends on, as text and as a digest. Pure.

A batch is taken from a cache only where all of this is equal: a recipe that has changed never gets
an old batch. The text is kept beside the batches, so that a person can see what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from resilience.data.json_text import Json, to_json_text
from resilience.data.sources import Source

Stage = Literal["train", "val"]

VERSION = 1
"""Raised when the same source would be stored, or numbered, in another way."""

DIGEST_BYTES = 32
_NAME_DIGITS = 16


def describe(
    identity: Mapping[str, Json],
    *,
    source: Source,
    stage: Stage,
    rank: int,
    size: int,
    samples_per_batch: int,
    version: int = VERSION,
) -> str:
    """Return the text of all that the batches of one position depend on; equal means equal.

    `identity` is what the caller knows of its data: dataset, tokenizer, seed, sequence length,
    parallel layout. `rank` of `size` is the data-parallel position. Raises TypeError for an
    identity that JSON cannot hold, and ValueError for a position that does not exist.
    """
    if not 0 <= rank < size:
        raise ValueError(f"position {rank} of {size} does not exist; want 0 to {size - 1}")
    if samples_per_batch < 1:
        raise ValueError(f"{samples_per_batch} samples a batch is not allowed; want 1 or more")
    content: dict[str, Json] = {
        "identity": identity,
        "source": {"reference": source.reference, "arguments": source.arguments},
        "stage": stage,
        "rank": rank,
        "size": size,
        "samples_per_batch": samples_per_batch,
        "version": version,
    }
    return to_json_text(content, "identity")


def digest(text: str) -> bytes:
    """Return the 32 bytes that stand for a description."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def cache_name(text: str, *, stage: Stage, rank: int, size: int) -> str:
    """Return the name of the folder that holds the batches of a description.

    The name has only a part of the digest; the segments have all of it.
    """
    return f"{stage}-{rank}of{size}-{digest(text).hex()[:_NAME_DIGITS]}"

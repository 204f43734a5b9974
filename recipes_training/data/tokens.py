"""Tokens of a whole data set, cut into samples of one length.

A sample is `seq_length` inputs and the token after each of them: sample i has
the tokens from i * seq_length on, so neighbours share one token. Documents are
packed, one after the other with an end token between; attention crosses them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes_training.errors import DataError

END_OF_TEXT_BYTE = 256

Tokens = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line, and the words in which an error says where it is."""

    where: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A data set; `tokens` may be a memory map far larger than memory."""

    tokens: Tokens
    seq_length: int

    @property
    def num_samples(self) -> int:
        """Return how many samples there are; a rest shorter than one is left out."""
        return max(0, (len(self.tokens) - 1) // self.seq_length)

    def read(self, numbers: Iterable[int]) -> NDArray[np.int64]:
        """Return one row of seq_length + 1 tokens for each sample number."""
        length = self.seq_length
        rows = [self.tokens[number * length : (number + 1) * length + 1] for number in numbers]
        return np.stack(rows).astype(np.int64)


def check_num_samples(samples: Samples, global_batch_size: int) -> None:
    """Refuse data that does not fill one step."""
    if samples.num_samples < global_batch_size:
        raise DataError(
            f"the data has {samples.num_samples} samples of {samples.seq_length} tokens and one "
            f"step takes trainer.global_batch_size {global_batch_size}; give more text, or "
            "lower data.seq_length or trainer.global_batch_size"
        )


def describe_samples(samples: Samples) -> str:
    """Return a text that is another one for other samples, as far as two of them tell."""
    checksum = zlib.crc32(samples.read([0, samples.num_samples - 1]).tobytes())
    return f"{samples.num_samples} samples with checksum {checksum:08x}"


def encode_bytes(text: bytes) -> Tokens:
    """Return the bytes as tokens, and the end token after them."""
    tokens = np.empty(len(text) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = END_OF_TEXT_BYTE
    return tokens

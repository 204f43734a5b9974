"""What a producer is told when it is started: one JSON text. No heavy import here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

SOCKET_NAME = "p.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerProcess:
    """A process whose end ends the producer; the time tells it from a later one of that number."""

    pid: int
    started: int
    """In the kernel's ticks after the boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSpec:
    """All that a producer depends on."""

    reference: str
    """`module:function` that makes the dataloader."""
    arguments: Mapping[str, Any]
    root: str
    job: str
    keep_s: float
    folder: str
    """The cache's own folder, within the root."""
    fingerprint: str
    """32 bytes in hexadecimal."""
    stage: Literal["train", "val"]
    rank: int
    size: int
    samples_per_batch: int
    first: int
    """Number of the batch that is needed first."""
    checkpoint: int | None = None
    """First batch after the newest complete checkpoint, where the starting consumer was told."""
    prefetch_length: int
    lookback_length: int
    checkpoint_frequency: int | None
    budget_bytes: int
    encryption: Mapping[str, Any] | None
    owner: OwnerProcess | None
    linger_s: float
    """How long a producer without an owner waits for a consumer when the last has gone."""
    module_path: tuple[str, ...]
    """Where the caller finds modules."""


def encode_spec(spec: ProducerSpec) -> str:
    """Return the text that `parse_spec` reads."""
    return json.dumps(asdict(spec))


def parse_spec(text: str) -> ProducerSpec:
    """Return what was encoded."""
    content = json.loads(text)
    content["module_path"] = tuple(content["module_path"])
    if content["owner"] is not None:
        content["owner"] = OwnerProcess(**content["owner"])
    return ProducerSpec(**content)


def read_started(pid: int) -> int | None:
    """Return when a process was started; None where there is none of this number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything; the time is the 22nd field.
    return int(text.rpartition(")")[2].split()[19])

"""Shards of a daemon's memory that a worker has in hand: to be filled, or to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from resilience.tiered.errors import TieredError
from resilience.tiered.shard import ShardMeta, read_meta

TIMEOUT_S = 30.0
"""How long a call may take, to connect included."""
SLOWEST_BYTES_PER_S = 128 << 20
"""How slowly memory may be made; a begin gets as much more time."""

Check = Callable[[], None]
"""Raises to end a wait."""


class Ask(Protocol):
    """Asks a daemon for something."""

    def __call__(
        self, request: Mapping[str, Any], timeout_s: float, check: Check | None = None
    ) -> dict[str, Any]:
        """Return the answer, within the time; raises LostError and what the daemon answers."""


class Draft(AbstractContextManager["Draft"]):
    """A shard that is being written. A context manager: left without a commit, it never was."""

    def __init__(self, ask: Ask, segment: int, memory: memoryview) -> None:
        """`ask` asks on the connection that the writing was begun on."""
        self.segment = segment
        self.memory = memory
        """The shard's bytes, to be filled; not to be written to after commit or abort."""
        self._ask = ask
        self._is_open = True

    def commit(self, meta: ShardMeta) -> ShardMeta:
        """Make the shard visible.

        Raises LostError where the daemon ended meanwhile: nothing is visible then, unless
        only its answer was lost. ValueError for a meta that is not of what was begun.
        """
        if not self._is_open:
            raise ValueError("the writing is over")
        self._is_open = False
        request = {"op": "commit", "segment": self.segment, "meta": meta}
        self._ask(request, TIMEOUT_S)
        return meta

    def abort(self) -> None:
        """Give it up; a no-op after a commit or an abort. Never raises for a lost daemon."""
        if self._is_open:
            self._is_open = False
            with suppress(TieredError):
                self._ask({"op": "abort", "segment": self.segment}, TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        self.abort()


class Loan(AbstractContextManager["Loan"]):
    """A shard that is being read. A context manager that releases it.

    Should the daemon end meanwhile, the memory may be used again: check what was copied.
    """

    def __init__(
        self, ask: Ask, segment: int, memory: memoryview, answer: Mapping[str, Any]
    ) -> None:
        """`ask` asks on the connection that the shard was lent on."""
        self.segment = segment
        self.memory = memory
        """The shard's bytes, read-only."""
        self.meta = read_meta(answer["meta"])
        self.source = str(answer["source"])
        """Where it came from: "ram" for this node's own memory."""
        self._ask = ask
        self._is_open = True

    def bad(self, *, check: Check | None = None) -> bool:
        """Say that the bytes do not fit their checksums; returns whether they were dropped.

        The daemon hashes them again, and keeps what it finds intact. `check` is as in `read`.
        """
        request = {"op": "bad", "segment": self.segment}
        limit_s = TIMEOUT_S + self.meta.num_bytes / SLOWEST_BYTES_PER_S
        return bool(self._ask(request, limit_s, check)["is_dropped"])

    def release(self) -> None:
        """Let it go; a no-op the second time. Never raises for a lost daemon."""
        if self._is_open:
            self._is_open = False
            with suppress(TieredError):
                request = {"op": "release", "segment": self.segment}
                self._ask(request, TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        self.release()

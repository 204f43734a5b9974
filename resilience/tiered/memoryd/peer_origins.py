"""Which node each copy came from, kept beside the segments.

A node copies what was written to it, and leaves to others what was written to them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from resilience.runtime.records import from_json, read_record, to_json
from resilience.tiered.errors import VaultFullError
from resilience.tiered.shard import ShardId

_FILE = "copies.json"
_RECENT = 64
"""So many of the newest notes stay though their shards are not there: they may be about to come."""


class Origins:
    """The list of what came from other nodes. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._lock = threading.Lock()
        self._nodes: dict[ShardId, str] = self._read()

    def of(self, shard_id: ShardId) -> str | None:
        """Return the node that a copy came from; None for what was written here."""
        return self._nodes.get(shard_id)

    def note(self, shard_id: ShardId, node: str, held: Collection[ShardId]) -> None:
        """Note where a copy comes from, before it is there; what is not held is forgotten.

        Raises VaultFullError where there is no room for the list.
        """
        with self._lock:
            recent = set(list(self._nodes)[-_RECENT:])
            kept = {
                each: name for each, name in self._nodes.items() if each in held or each in recent
            }
            kept.pop(shard_id, None)
            self._nodes = {**kept, shard_id: node}
            new = self._path.with_suffix(".json.new")
            try:
                new.touch(mode=0o600)
                new.write_bytes(to_json(list(self._nodes.items())))
                new.replace(self._path)
            except OSError as error:
                raise VaultFullError(f"no room for the list of copies: {error}") from error

    def _read(self) -> dict[ShardId, str]:
        try:
            rows = from_json(self._path.read_bytes())
            return dict(read_record(list[tuple[ShardId, str]], rows, "list of copies"))
        except (OSError, ValueError):
            return {}

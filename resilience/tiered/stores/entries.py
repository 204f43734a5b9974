"""Reads many entries of a store: one that cannot be read hides no other."""

from __future__ import annotations

from collections.abc import Callable

from resilience.tiered.errors import TierError
from resilience.tiered.shard import ShardId, ShardMeta
from resilience.tiered.stores.deadline import DeadlineError
from resilience.tiered.stores.store import Store

_FAILURES_MAX = 3
"""After so many entries in a row that could not be read, the store itself counts as broken."""


class EntryReader:
    """Reads entries one after the other, and tells a damaged one from a store that fails."""

    def __init__(self, store: Store, on_left_out: Callable[[ShardId, TierError], None]) -> None:
        """`on_left_out` is told of each entry that cannot be read, and why."""
        self._store = store
        self._on_left_out = on_left_out
        self._num_failed = 0

    def read(self, shard_id: ShardId) -> ShardMeta | None:
        """Return what an entry says; None where it has gone, or is left out.

        Raises TierError where the store does not answer, or fails for entry after entry.
        """
        try:
            meta = self._store.get_meta(shard_id)
        except DeadlineError:
            raise
        except TierError as error:
            self._num_failed += not _is_of_entry(error)
            if self._num_failed >= _FAILURES_MAX:
                raise
            self._on_left_out(shard_id, error)
            return None
        self._num_failed = 0
        return meta


def _is_of_entry(error: TierError) -> bool:
    """Return whether an entry is at fault, which another try does not mend, and not the store."""
    return error.__cause__ is None or isinstance(error.__cause__, (ValueError, TierError))

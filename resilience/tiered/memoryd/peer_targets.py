"""Which nodes this one sends its shards to, found out once for all links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_options import PeerSettings
from resilience.tiered.memoryd.peer_plan import choose_targets

_MANY = 64
_SETTLE_S = 1.0
"""With more nodes than that, how long they have to stay the same before placement is renewed:
nodes start and fail by the dozen."""


class Targets:
    """The nodes that placement gives this node's shards to. Any thread."""

    def __init__(
        self,
        directory: Directory,
        settings: PeerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._names: frozenset[str] | None = None
        self._num_used = -1
        """After how many changes of who is there the names were found."""
        self._num_seen = -1
        self._seen_s = 0.0

    def names(self) -> frozenset[str]:
        """Return who is given this node's shards now."""
        num_there = self._directory.own_changes[1]
        names = self._names
        if names is not None and num_there == self._num_used:
            return names
        with self._lock:
            if num_there > self._num_seen:
                self._num_seen, self._seen_s = num_there, self._clock()
            if self._names is None or self.rest_s() == 0:
                self._names = choose_targets(
                    self._settings.own,
                    self._directory.nodes(),
                    replicas=self._settings.replicas,
                    holds_instead=self._settings.holds_instead,
                )
                self._num_used = num_there
            return self._names

    def rest_s(self) -> float | None:
        """Return when to ask for the names again though nothing happens; None for never."""
        if self._num_used >= self._num_seen:
            return None
        settle_s = _SETTLE_S if len(self._settings.peers) > _MANY else 0.0
        return max(0.0, self._seen_s + settle_s - self._clock())

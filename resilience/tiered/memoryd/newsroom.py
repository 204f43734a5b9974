"""Keeps what is new of the store for agents that ask for it, and wakes them when it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resilience.runtime.wake import Wake
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.news import STALL_S, StoreNews
from resilience.tiered.uploads import judge

TRIAL_S = 20.0
"""How long the store's trial at the start may take."""
_CLOSE_TIMEOUT_S = 5.0


class Newsroom:
    """Looks at the store in a thread of its own, from `start` to `close`. Any thread."""

    def __init__(self, board: Board, shelf: Shelf, lacks: Callable[[], list[int]]) -> None:
        """`lacks` returns the steps that the store is to get and has not."""
        self._board = board
        self._shelf = shelf
        self._lacks = lacks
        self._lock = threading.Lock()
        self._told = 0
        self._news: StoreNews | None = None
        self._own: set[str] = set()
        """Namespaces that jobs of this daemon's life have, or had."""
        self._waiting: set[Wake] = set()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="newsroom", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._is_closed.set()
        self._board.wake()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def tell(self) -> tuple[int, StoreNews]:
        """Return how the store does now, and the number of it, which grows with each change."""
        news = self._look()
        with self._lock:
            if news != self._news:
                self._news, self._told = news, self._told + 1
                for each in self._waiting:
                    each.set()
            return self._told, news

    @contextmanager
    def waiting(self, number: int) -> Iterator[Wake]:
        """Yield a descriptor that is readable once there is something newer than `number`."""
        wake = Wake()
        try:
            with self._lock:
                self._waiting.add(wake)
                if self._told > number:
                    wake.set()
            yield wake
        finally:
            with self._lock:
                self._waiting.discard(wake)

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            # Before the look: what changes meanwhile is looked at again.
            seen = self._board.version
            self.tell()
            stalled_s = self._shelf.stalled_s
            limits = [] if stalled_s is None else [STALL_S - stalled_s, TRIAL_S - stalled_s]
            self._board.wait(seen, min((each for each in limits if each > 0), default=None))

    def _look(self) -> StoreNews:
        stored: list[int] = []
        for view in self._board.views():
            if self._board.vault.is_claimed(view.namespace):
                self._own.add(view.namespace)
            if view.namespace in self._own:
                whole = [each for each in judge(view).steps if each.is_whole and not each.is_stale]
                stored += [each.at.step for each in whole if self._shelf.tier in each.whole_tiers]
        trial, failure, lacking = self._shelf.trial, self._shelf.failure, tuple(self._lacks())
        stalled_s = self._shelf.stalled_s or 0.0
        if trial is None and stalled_s >= TRIAL_S:
            trial = f"it has not answered for {TRIAL_S:g} s"
        if lacking and not failure and stalled_s >= STALL_S:
            failure = f"it has not answered for {STALL_S:g} s"
        return StoreNews(
            name=self._shelf.name,
            trial=trial,
            failure=failure,
            stored_step=max(stored, default=None),
            lacking=lacking,
        )

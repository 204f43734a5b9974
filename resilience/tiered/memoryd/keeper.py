"""Decides what stays: drops what newer steps make superfluous, and feeds the store."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from resilience.tiered.catalog import find_only_copies
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.carrier import Carrier
from resilience.tiered.memoryd.newsroom import Newsroom
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peer_server import OWNER as PEERS
from resilience.tiered.memoryd.status import describe_board
from resilience.tiered.retention import Save, find_save, plan_drops
from resilience.tiered.uploads import View, judge

CLOSE_TIMEOUT_S = 5.0
"""How long an upload may go on at the end."""

_READ_S = 1.0
"""When to look again at what others keep and somebody reads here."""
_FAILED_S = 60.0
"""After a fault of its own it goes on with the next change, or after so long."""


class Keeper:
    """Works in the vault from `start` to `close`: a thread for memory, another for the store.

    Both sleep until something changes, here, at a peer or in the store, or until time alone
    changes what is to be done.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._carrier: Carrier | None = None
        self.newsroom: Newsroom | None = None
        """What agents are told of the store."""
        if board.shelf:
            self._carrier = Carrier(board, board.shelf)
            self.newsroom = Newsroom(board, board.shelf, self._carrier.lacks)
        self._saves: dict[str, Save] = {}
        self.settle_others: Callable[[], None] = lambda: None
        """Drops what doors keep by rules of their own."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="keeper", daemon=True)
        if board.shelf:
            board.shelf.on_change = board.wake

    def start(self) -> None:
        """Begin; what an earlier daemon has left is looked through first."""
        self._thread.start()
        if self._carrier and self.newsroom:
            self._carrier.start()
            self.newsroom.start()

    def drain(self, limit_s: float) -> bool:
        """Return whether the store has what it is to get, also from other nodes, in time.

        To be called while the doors are open: the others count on this node. One that holds nothing
        has nothing to bring.
        """
        end_s = time.monotonic() + limit_s
        while self._carrier:
            version = self._board.version
            if not (steps := self._carrier.lacks()) or self._board.is_empty():
                break
            if (rest_s := end_s - time.monotonic()) <= 0:
                complain(f"ends after {limit_s:g} s, and the store lacks steps {steps}")
                return False
            self._board.wait(version, rest_s)
        return True

    def name_only_copies(self) -> None:
        """Say what goes with this node, where others go on that do not have it."""
        for view in self._board.views():
            only = find_only_copies(judge(view), view.own)
            if only and len(view.living) > 1:
                at, shards = only
                complain(f"only this node has {shards} of {view.namespace}'s newest {at}")

    def close(self) -> None:
        """End; what is being sent to the store is left, and never was."""
        self._is_closed.set()
        self._board.wake()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._carrier and self.newsroom:
            self._carrier.close(CLOSE_TIMEOUT_S)
            self.newsroom.close()

    def describe(self) -> dict[str, Any]:
        """Return what is where, what is waiting and what failed, as JSON data."""
        store = self._carrier.describe() if self._carrier else None
        return {"store": store, **describe_board(self._board)}

    def _serve(self) -> None:
        version = -1
        rest_s: float | None = 0.0
        while not self._is_closed.is_set():
            version = self._board.wait(version, rest_s)
            try:
                rest_s = self._keep()
            except Exception:  # noqa: BLE001 - saves go on without it
                complain(traceback.format_exc())
                rest_s = _FAILED_S

    def _keep(self) -> float | None:
        """Drop what nobody needs; returns when to look again, None for not before a change."""
        views = self._board.views()
        plans = [plan_drops(view) for view in views]
        is_read = False
        for plan in plans:
            self._board.drop(plan.drops)
            is_read |= not self._board.pass_on(plan.passed)
        if self._board.settings.keepers:
            self._trim(views)
        self.settle_others()
        rest_s = self._board.rest_s(views)
        return min(_READ_S, rest_s or _READ_S) if is_read else rest_s

    def _trim(self, views: Sequence[View]) -> None:
        """Leave free memory for the next save alone; what comes from others has it made anew.

        No worker waits for that.
        """
        sizes = {}
        for view in views:
            before = self._saves.get(view.namespace, Save())
            sizes[view.namespace] = find_save(view, before)
        self._saves = sizes
        free_bytes = sum(each.num_bytes for each in sizes.values())
        self._board.vault.trim(free_bytes, owner=PEERS)

"""Room for a shard that does not fit: the least valuable steps go, if that is enough."""

from __future__ import annotations

import mmap
import threading

from resilience.tiered.errors import VaultFullError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.retention import RoomPlan, plan_room
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import Writing

_TRIES = 8
"""How often others may take the room that was made before the save is refused."""


class Room:
    """Makes room in a vault. Any thread."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()

    def begin(
        self, shard_id: ShardId, num_bytes: int, *, owner: str = "", is_copy: bool = False
    ) -> Writing:
        """Begin as the vault does; what can be done without goes where there is no room.

        VaultFullError says then why the rest has to stay.
        """
        vault = self._board.vault
        self._board.uses.note_use(shard_id.namespace)
        is_odd = False
        for _ in range(_TRIES):
            try:
                return vault.begin(shard_id, num_bytes, owner=owner, is_copy=is_copy)
            except VaultFullError as error:
                # Where it does not fit though there is room, others were faster, or the file
                # system has less than the budget: then what is free is worth nothing.
                plan = self._make(num_bytes, free_bytes=0 if is_odd else None, begun=shard_id)
                if not plan.drops and (is_odd or not plan.is_enough):
                    raise VaultFullError(f"{error}; {plan.reason}") from error
                is_odd = not plan.drops
        return vault.begin(shard_id, num_bytes, owner=owner, is_copy=is_copy)

    def ask(self, num_bytes: int) -> bool:
        """Drop what can be done without until so much fits; says whether anything went."""
        return bool(self._make(num_bytes).drops)

    def _make(
        self, num_bytes: int, *, free_bytes: int | None = None, begun: ShardId | None = None
    ) -> RoomPlan:
        needed_bytes = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        with self._lock:
            plan = plan_room(
                self._board.views(by_segments=True),
                needed_bytes=needed_bytes,
                free_bytes=self._board.vault.free_bytes if free_bytes is None else free_bytes,
                begun=begun,
            )
            self._board.drop(plan.drops)
        return plan

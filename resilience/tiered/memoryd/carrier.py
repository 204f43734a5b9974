"""Brings steps from memory to the store, and deletes there what is kept no longer."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from resilience.tiered.catalog import step_of
from resilience.tiered.errors import TieredError, TierError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.memoryd.status import lag_of_store
from resilience.tiered.retention import plan_tier_drops
from resilience.tiered.shard import ShardId, piece_bounds
from resilience.tiered.uploads import Sending, Upload, View, find_wanted, judge, plan_uploads
from resilience.tiered.vault import Reading, show

LOOK_TIMEOUT_S = 900.0
"""How long a listing may take; each of its calls has a deadline of its own."""
_TOLD_S = 30.0
"""How long other nodes may take to hear what this one is about to send; they may be busy."""
OTHERS_FIRST_S = 2.0
OTHERS_MAX_S = 60.0
"""How long to wait for what other nodes send before the store is listed again: it tells nobody."""


class EndedError(TieredError):
    """The daemon ends in the middle of an upload."""


class _UnsentError(TierError):
    """The store has not taken what it was to get."""


class _BadCopyError(TieredError):
    def __init__(self, shard_id: ShardId) -> None:
        super().__init__(f"{show(shard_id)} in memory is not what its checksums say")
        self.shard_id = shard_id


class Carrier:
    """Does what the plan of uploads says, one thing at a time, in a thread of its own.

    An error of the store is noted and tried again after a pause that grows; other uploads
    go first then. Nothing else waits for the store.
    """

    def __init__(self, board: Board, shelf: Shelf) -> None:
        self._board = board
        self._shelf = shelf
        self._is_closed = threading.Event()
        self._failures: Counter[str] = Counter()
        self._others_s = OTHERS_FIRST_S
        self._look_s: float | None = None
        """When to list again, because other nodes are to send something."""
        self._thread = threading.Thread(target=self._serve, name="carrier", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Leave what is being sent, which then never was; a call that hangs is left to itself."""
        self._is_closed.set()
        self._board.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def lacks(self) -> list[int]:
        """Return the steps that the store has to get and has not, from any node."""
        views = self._board.views()
        wanted = {
            at.step for view in views for at in find_wanted(view, judge(view), self._shelf.tier)
        }
        # One that is not whole yet may be so in a moment.
        return sorted(wanted | {at.step for _, at in self._board.sendings.flushes()})

    def describe(self) -> dict[str, Any]:
        """Return how the store does and what it lacks, as JSON data."""
        tier = self._shelf.tier
        namespaces = {}
        for view in self._board.views():
            catalog = judge(view)
            # What has to settle before it is sent waits, too.
            waiting = find_wanted(view, catalog, tier)
            stored = [step_of(each).step for each in view.copies if each.tier == tier]
            held = [step_of(each).step for each in view.copies if each.tier == "ram"]
            namespaces[view.namespace] = {
                "newest_step": max(stored, default=None),
                "newest_step_in_memory": max(held, default=None),
                "steps_waiting": sorted({at.step for at in waiting}),
                "bytes_waiting": lag_of_store(view, catalog)["num_bytes"],
            }
        return {**self._shelf.describe(), "namespaces": namespaces}

    def _serve(self) -> None:
        version = -1
        rest_s: float | None = 0.0
        self._shelf.try_out()
        # Else it would send what others hold, too, and are sending.
        self._board.peers.wait_known()
        while not self._is_closed.is_set():
            version = self._board.wait(version, rest_s)
            try:
                rest_s = self._work()
            except EndedError:
                return
            except Exception as error:  # noqa: BLE001 - a store never ends the daemon
                rest_s = self._shelf.fail(error, takes_nothing=isinstance(error, _UnsentError))
                complain(f"the store {self._shelf.name} failed: {error}")

    def _work(self) -> float | None:
        """Do one thing; returns how long there is nothing else to do, None for no limit."""
        if pause_s := self._shelf.pause_s():
            return pause_s
        listed = self._shelf.listed()
        views = self._board.views()
        # What was listed meanwhile is seen in part, as whatever comes first in the listing.
        new = [each.namespace for each in views if each.namespace not in listed]
        if new:
            if not self._shelf.is_listed(new[0]):
                with self._shelf.asked():
                    self._shelf.look(new[0], timeout_s=LOOK_TIMEOUT_S)
                self._shelf.succeed()
            return 0.0
        plans = [(view, plan_uploads(view)) for view in views]
        own = [(view, each) for view, plan in plans for each in plan if each.node == view.own]
        if own:
            view, upload = min(own, key=lambda each: self._failures[each[1].digest])
            # Else a full store would wait for room that only what is to be deleted can give.
            if not (self._failures[upload.digest] and any(map(self._delete, views))):
                self._send(view, upload)
            return 0.0
        if any(map(self._delete, views)):
            return 0.0
        rest_s = self._board.rest_s(views)
        # A node that has sent its part of a flushed step, and ended since, has told nobody.
        flushed = {name for name, _ in self._board.sendings.flushes()}
        if others := [view for view, plan in plans if plan or view.namespace in flushed]:
            look_s = self._look_after(others)
            return look_s if rest_s is None else min(look_s, rest_s)
        self._others_s, self._look_s = OTHERS_FIRST_S, None
        return rest_s

    def _send(self, view: View, upload: Upload) -> None:
        """Bring bytes to the store, then the descriptions that name them."""
        sending = Sending(
            tier=upload.tier, at=upload.at, digest=upload.digest, node=self._board.own.name
        )
        has_taken = False
        try:
            with self._board.sending(view.namespace, sending):
                # Of two that begin at once each is told, and at least one of them sees the
                # other before it sends: who does leaves it.
                self._board.peers.wait_told(_TOLD_S)
                if self._board.is_sent_elsewhere(view.namespace, upload.digest):
                    return
                with self._shelf.asked():
                    has_taken = self._put(view.namespace, upload)
        except _BadCopyError as error:
            complain(str(error))
            with suppress(KeyError):  # it went meanwhile
                if self._board.vault.check(error.shard_id):
                    raise
        except TierError as error:
            self._failures[upload.digest] += 1
            raise _UnsentError(str(error)) from error
        del self._failures[upload.digest]
        self._shelf.succeed(has_taken=has_taken)

    def _put(self, namespace: str, upload: Upload) -> bool:
        """Return whether there was something to bring, which the store has taken."""
        vault, store = self._board.vault, self._shelf.store
        found = [vault.find(each) for each in upload.shard_ids]
        metas = [each for each in found if each is not None]
        if not metas:
            return False
        self._shelf.check_owner(namespace)
        try:
            reading = vault.read(metas[0].id)
        except KeyError:  # dropped since it was planned
            return False
        with reading:
            pieces = self._pieces(reading)
            is_bad = self._shelf.is_bad(namespace, upload.digest)
            store.put_data(
                namespace, upload.digest, reading.meta.num_bytes, pieces, replaces=is_bad
            )
            if is_bad:
                complain(f"{show(metas[0].id)} was damaged in {self._shelf.name}: sent again")
        for each in metas:
            if self._is_closed.is_set():
                raise EndedError("the daemon ends")
            store.put_meta(each)
            self._shelf.note(each)
        return True

    def _pieces(self, reading: Reading) -> Iterator[memoryview]:
        """Yield the shard's pieces, each of them checked."""
        meta, memory = reading.meta, reading.memory
        for (begin, end), checksum in zip(
            piece_bounds(meta.num_bytes), meta.checksums, strict=True
        ):
            if self._is_closed.is_set():
                raise EndedError("the daemon ends")
            if xxhash.xxh3_64_intdigest(memory[begin:end]) != checksum:
                raise _BadCopyError(meta.id)
            yield memory[begin:end]
            self._shelf.get_on()

    def _delete(self, view: View) -> bool:
        """Delete the first step that is kept no longer, if that is this node's to do."""
        tier = self._shelf.tier
        plan = plan_tier_drops(view, tier)
        if not plan.steps or plan.node != view.own:
            return False
        at = plan.steps[0]
        lost = self._shelf.store.delete_step(
            view.namespace, at.step, at.generation, spare=plan.spare
        )
        self._shelf.forget(view.namespace, at)
        if lost:
            # Whoever put those entries believes that they are there, and is told otherwise.
            self._shelf.look(view.namespace, timeout_s=LOOK_TIMEOUT_S)
            self._shelf.mark_lost(view.namespace, lost)
            self._board.peers.wake()
        self._shelf.succeed()
        return True

    def _look_after(self, views: Sequence[View]) -> float:
        """See what others have sent, when it is time; returns when to look again."""
        now_s = time.monotonic()
        if self._look_s is None:
            self._look_s = now_s + self._others_s
        elif now_s >= self._look_s:
            for view in views:
                self._shelf.look(view.namespace, timeout_s=LOOK_TIMEOUT_S)
            self._others_s = min(OTHERS_MAX_S, 2 * self._others_s)
            self._look_s = time.monotonic() + self._others_s
        return max(0.0, self._look_s - time.monotonic())

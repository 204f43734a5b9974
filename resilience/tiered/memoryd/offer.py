"""What a daemon offers to readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import xxhash

from resilience.tiered.attempts import BegunRun, KnownStep, KnownSteps
from resilience.tiered.catalog import Catalog, Copy, StepAt, StepState, choose_source, judge_steps
from resilience.tiered.errors import HeldError, TieredError, TierError, VaultFullError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.room import Room
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.shard import PIECE_BYTES, ShardId, ShardMeta, content_digest
from resilience.tiered.vault import Reading, show

LOOK_TIMEOUT_S = 10.0
"""How long a reader waits for the listing of a store; what is known by then is used."""

BRING_TIMEOUT_S = 600.0
"""How long a reader waits for another one that gets the same shard."""

HELD_TIMEOUT_S = 60.0
"""How long a reader waits for somebody else who writes this very shard here."""

_WINDOW_PIECES = 8
"""How many pieces a store is asked for at once."""
_BAD_MAX = 4096

OWN_MEMORY = "ram"
"""What the own memory is called as a source."""


class BadCopyError(TieredError):
    """A copy is not what its checksums say."""


class TieredOffer:
    """The complete steps of all nodes and of the store; gets what this node lacks.

    What is read from elsewhere lies in the vault from then on. Of a copy that was not what
    it should be nothing is seen, and it is not tried again.
    """

    def __init__(self, board: Board, room: Room) -> None:
        self._board = board
        self._room = room
        self._lock = threading.Lock()
        self._under_way: dict[ShardId, threading.Event] = {}
        self._bad: set[tuple[str, Copy]] = set()

    def steps(self, namespace: str) -> list[StepState]:
        """Return the complete steps, newest first, as soon as it is known what peers hold.

        TierError where there is none and the store cannot be asked: that is not the same
        as a job that has never saved. TierError, too, where peers that this daemon has never
        heard may have what a newer step lacks here. What was complete stays on offer while
        copies that went with a node are made anew.
        """
        self._board.peers.wait_known()
        error = self._look(namespace)
        catalog = self._judge(namespace)
        complete = self._complete(namespace, catalog)
        if not complete and error is not None:
            raise error
        self._check_heard(catalog, complete)
        return complete

    def known(self, namespace: str) -> KnownSteps:
        """Return all steps that were ever begun, as far as it is known here; waits as `steps` does.

        The store is listed once, and left out where that fails: a save into memory does not
        need it.
        """
        self._board.peers.wait_known()
        if self._board.shelf is not None and not self._board.shelf.is_listed(namespace):
            self._look(namespace)
        is_whole = dict.fromkeys(self._board.seen(namespace), False)
        for step, generation in self._board.vault.begun(namespace):
            is_whole[StepAt(step=step, generation=generation)] = False
        for each in self._judge(namespace).steps:
            is_whole[each.at] = each.is_whole and not each.is_stale
        _, runs = self._board.vault.runs().get(namespace, (None, {}))
        first = max(runs, default=None)
        return KnownSteps(
            run=None if first is None else BegunRun(first_generation=first, step=runs[first]),
            steps=tuple(
                KnownStep(step=at.step, generation=at.generation, is_whole=whole)
                for at, whole in sorted(is_whole.items())
            ),
        )

    def bring(self, shard_id: ShardId) -> tuple[str, Reading]:
        """Return a shard with the name of its source: ram, peer:NODE, s3:... or folder:...

        Sources are tried from near to far. Raises KeyError where nobody has it, TierError
        where no copy could be had or was intact, VaultFullError where it finds no room.
        """
        end_s = time.monotonic() + HELD_TIMEOUT_S
        self._board.uses.note_use(shard_id.namespace)
        with self._board.fetched(shard_id), self._alone(shard_id):
            while True:
                version = self._board.version
                with suppress(KeyError):
                    return OWN_MEMORY, self._board.vault.read(shard_id)
                try:
                    source = self._fetch(shard_id)
                except HeldError:
                    # A peer is bringing it, or a worker writes it.
                    rest_s = end_s - time.monotonic()
                    if rest_s <= 0:
                        raise
                    self._board.wait(version, rest_s)
                else:
                    return source, self._board.vault.read(shard_id)

    def _judge(self, namespace: str) -> Catalog:
        return judge_steps(
            self._intact(namespace),
            self._board.living(),
            namespace=namespace,
            domains_min=self._board.settings.domains_min,
            seen=self._board.seen(namespace),
            keepers=self._board.settings.keepers,
        )

    def _complete(self, namespace: str, catalog: Catalog) -> list[StepState]:
        before = self._board.was_complete(namespace)
        return [
            each
            for each in catalog.steps
            if not each.is_stale and (each.is_complete or (each.is_whole and each.at in before))
        ]

    def _check_heard(self, catalog: Catalog, complete: Sequence[StepState]) -> None:
        """Raise TierError where a newer step than these may be complete with peers not heard yet.

        Who takes an older one instead, or begins anew, would have the newer one dropped.
        """
        unheard = self._board.peers.unheard()
        newest = next((each.at for each in catalog.steps if not each.is_stale), None)
        if unheard and newest and newest not in [each.at for each in complete]:
            raise TierError(
                f"{newest} is here in part, and the rest may be with {', '.join(unheard)}, not "
                "heard since this daemon began: start memoryd there, though its memory be lost"
            )

    def _look(self, namespace: str) -> TierError | None:
        """Ask the store what it holds; returns its error."""
        shelf = self._board.shelf
        try:
            if shelf is not None:
                shelf.look(namespace, timeout_s=LOOK_TIMEOUT_S)
        except TierError as error:
            complain(f"a listing failed: {error}")
            return error
        return None

    def _fetch(self, shard_id: ShardId) -> str:
        """Get a shard into the vault; returns the source."""
        errors: list[str] = []
        self._board.peers.wait_known()
        sources = self._sources(shard_id)
        if not sources:
            if error := self._look(shard_id.namespace):
                errors.append(str(error))
            sources = self._sources(shard_id)
        for copy in sources:
            name = f"peer:{copy.place}" if copy.tier == "ram" else f"{copy.tier}:{copy.place}"
            try:
                self._take(copy)
            except (VaultFullError, HeldError):
                raise
            except (TieredError, KeyError) as error:
                complain(f"{show(shard_id)} from {name}: {error}")
                errors.append(f"{name}: {error}")
            else:
                return name
        if errors or self._is_bad(shard_id):
            tried = "; ".join(errors) or "no copy is intact"
            raise TierError(f"{show(shard_id)} cannot be had: {tried}")
        raise KeyError(f"{show(shard_id)} is nowhere")

    def _sources(self, shard_id: ShardId) -> list[Copy]:
        """Return the copies that lie elsewhere, from near to far."""
        own = self._board.own.name
        sources = choose_source(
            self._intact(shard_id.namespace), shard_id, self._board.living(), own=own
        )
        return [each for each in sources if (each.tier, each.place) != ("ram", own)]

    def _take(self, copy: Copy) -> None:
        """Get one copy; raises BadCopyError where it is not what it should be."""
        shelf = self._board.shelf
        with self._room.begin(copy.meta_id, copy.num_bytes, is_copy=True) as writing:
            try:
                if copy.tier == "ram":
                    check = partial(_check_piece, copy, writing.memory)
                    meta = self._board.peers.fetch(copy, writing.memory, check)
                    _check_meta(meta, copy)
                else:
                    assert shelf is not None
                    meta = _read_stored(shelf, copy, writing.memory)
            except BadCopyError:
                self._mark_bad(copy)
                raise
            writing.commit(meta)
        if copy.tier != "ram" and shelf is not None:
            shelf.succeed()

    def _intact(self, namespace: str) -> list[Copy]:
        """Return the copies of a namespace that were not found bad."""
        copies = self._board.copies(namespace, intact_only=True)
        there = {(namespace, each) for each in copies}
        with self._lock:
            # One that was dropped may come again, and is another one then.
            self._bad = {each for each in self._bad if each[0] != namespace or each in there}
            return [each for each in copies if (namespace, each) not in self._bad]

    def _mark_bad(self, copy: Copy) -> None:
        if copy.tier != "ram":
            assert self._board.shelf is not None
            self._board.shelf.mark_bad(copy)
            self._board.peers.wake()
            return
        self._board.peers.doubt(copy)
        with self._lock:
            if len(self._bad) >= _BAD_MAX:
                self._bad.clear()
            self._bad.add((copy.meta_id.namespace, copy))

    def _is_bad(self, shard_id: ShardId) -> bool:
        shelf = self._board.shelf
        stored = shelf.copies(shard_id.namespace) if shelf else []
        if shelf and any(
            shelf.is_bad(shard_id.namespace, each.digest)
            for each in stored
            if each.meta_id == shard_id
        ):
            return True
        with self._lock:
            return any(copy.meta_id == shard_id for _, copy in self._bad)

    @contextmanager
    def _alone(self, shard_id: ShardId) -> Iterator[None]:
        """Let nobody else get this shard within the block."""
        own = threading.Event()
        while True:
            with self._lock:
                other = self._under_way.setdefault(shard_id, own)
            if other is own:
                break
            if not other.wait(BRING_TIMEOUT_S):
                raise TierError(f"{show(shard_id)} has been under way for too long")
        try:
            yield
        finally:
            with self._lock:
                del self._under_way[shard_id]
            own.set()


def _check_piece(copy: Copy, memory: memoryview, meta: ShardMeta, number: int) -> None:
    """Compare a piece that has come with what the copy's digest stands for."""
    if number == 0:
        _check_meta(meta, copy)
    begin = number * PIECE_BYTES
    end = min(begin + PIECE_BYTES, copy.num_bytes)
    if xxhash.xxh3_64_intdigest(memory[begin:end]) != meta.checksums[number]:
        raise BadCopyError(f"bytes {begin} to {end} are not what their checksum says")


def _check_meta(meta: ShardMeta, copy: Copy) -> None:
    if meta.id != copy.meta_id or content_digest(meta) != copy.digest:
        raise BadCopyError("its description is of other content than was announced")


def _read_stored(shelf: Shelf, copy: Copy, memory: memoryview) -> ShardMeta:
    """Read a shard from the store and check it; what came wrong is asked for once more."""
    meta = shelf.store.get_meta(copy.meta_id)
    if meta is None:
        raise KeyError("it was deleted")
    _check_meta(meta, copy)
    check = partial(_check_piece, copy, memory)

    def read(first: int, end: int) -> None:
        begin_byte, end_byte = first * PIECE_BYTES, min(end * PIECE_BYTES, meta.num_bytes)
        into = memory[begin_byte:end_byte]
        shelf.store.get_data(meta.id.namespace, copy.digest, meta.num_bytes, into, begin=begin_byte)

    for first in range(0, len(meta.checksums), _WINDOW_PIECES):
        end = min(first + _WINDOW_PIECES, len(meta.checksums))
        read(first, end)
        for number in range(first, end):
            try:
                check(meta, number)
            except BadCopyError:
                read(number, number + 1)
                check(meta, number)
    return meta

"""One connection of the local door: the process at its other end, and what it has open."""

from __future__ import annotations

import hmac
import os
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from resilience.runtime.records import read_record
from resilience.runtime.wake import Wake
from resilience.tiered.catalog import StepAt, count_domains
from resilience.tiered.errors import RefusedError, TieredError, VaultFullError
from resilience.tiered.frames import describe_error, find_answer, read_peer
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.lease import Lease
from resilience.tiered.memoryd.listener import Listener
from resilience.tiered.memoryd.newsroom import Newsroom
from resilience.tiered.memoryd.offer import TieredOffer
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.room import Room
from resilience.tiered.memoryd.status import describe_vault
from resilience.tiered.namespaces import Claim
from resilience.tiered.paths import check_namespace, step_key
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId, content_digest, read_meta
from resilience.tiered.stores.owner import NamespaceOwner
from resilience.tiered.vault import Reading, Writing, show

VERSION = 1

_PROCESS_CHARS_MAX = 64
_END_TIMEOUT_S = 2.0
_NUMBER_MAX = (1 << 63) - 1

Reply = tuple[dict[str, Any], tuple[int, ...]]
"""What is answered, and the descriptors that go with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """What the door is told."""

    own: Node
    token: str
    """What everybody has to know; nothing: who can open the socket (0600) may come in."""
    connections_max: int
    idle_s: float
    """A connection that is silent for so long is ended, with what it has open."""
    arguments: tuple[str, ...]
    """What the daemon was started with, by which an agent knows it for its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all connections of a door share."""

    board: Board
    room: Room
    offer: TieredOffer
    settings: LocalSettings
    describe: Callable[[], Mapping[str, Any]]
    """Returns what else the status says, as JSON data."""
    lease: Lease
    newsroom: Newsroom | None = None
    """What is new of the store, where there is one."""


class ClientProcess(AbstractContextManager["ClientProcess"]):
    """The process at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        pid, _ = read_peer(connection)
        self.owner = f"process-{pid}" if pid else ""
        self._file: int | None = None
        self._is_over: bool | None = None
        # No number where it lives in a process namespace that this one does not see.
        if pid:
            with suppress(OSError):
                self._file = os.pidfd_open(pid)
        self._poll = select.poll()
        self._socket_file = connection.fileno()
        self._poll.register(self._socket_file, select.POLLIN)
        if self._file is not None:
            self._poll.register(self._file, select.POLLIN)

    def wait_also(self, file: Wake) -> None:
        """Block until a descriptor is readable, there is something to receive, or it has ended."""
        self._poll.register(file, select.POLLIN)
        self._poll.poll()
        self._poll.unregister(file)

    def waits_for_answer(self, timeout_s: float | None) -> bool:
        """Block until there is something to receive; False where the process has ended.

        False after `timeout_s`, too. A connection may outlive its process in a child.
        """
        timeout_ms = None if timeout_s is None else timeout_s * 1000
        return any(file == self._socket_file for file, _ in self._poll.poll(timeout_ms))

    def is_over(self) -> bool:
        """Return whether the process has ended and with it all its mappings.

        Waits 2 s the first time: the kernel ends a process after its connections.
        """
        if self._is_over is None:
            self._is_over = False
            if self._file is not None:
                poll = select.poll()
                poll.register(self._file, select.POLLIN)
                self._is_over = bool(poll.poll(_END_TIMEOUT_S * 1000))
        return self._is_over

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)


class Session:
    """What one connection has open, and the answers to its requests. One thread."""

    def __init__(
        self, house: House, process: ClientProcess, listener: Listener, lose: Callable[[], None]
    ) -> None:
        self.is_known = False
        """A hello was accepted."""
        self.is_supervisor = False
        """An agent is at the other end, which stays."""
        self._lose = lose
        self._house = house
        self._vault = house.board.vault
        self._process = process
        self._listener = listener
        self._namespace = ""
        self._owner = process.owner
        self._claim: Claim | None = None
        self._writings: dict[int, tuple[Writing, int]] = {}
        self._readings: dict[int, list[Reading]] = {}
        self._given: set[int] = set()

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Do what is asked; returns the reply and the descriptors that go with it."""
        try:
            if not self.is_known:
                return self._hello(request)
            reply: Reply = find_answer(self, request)(request)
        except (TieredError, KeyError, ValueError, OSError) as error:
            return describe_error(error), ()
        return reply

    def close(self) -> None:
        """Abort what was being written and release what was being read."""
        self._house.lease.drop(self)
        with ExitStack() as stack:
            if self._claim is not None:
                stack.callback(self._claim.close)
            for writing, _ in self._writings.values():
                stack.callback(writing.abort, self._process.is_over)
            for readings in self._readings.values():
                for reading in readings:
                    stack.callback(reading.close)

    def _hello(self, request: Mapping[str, Any]) -> Reply:
        if request.get("op") != "hello":
            raise RefusedError("the first request has to be hello")
        settings = self._house.settings
        token = request.get("token", "")
        if settings.token and not (
            isinstance(token, str)
            and hmac.compare_digest(token.encode(errors="replace"), settings.token.encode())
        ):
            raise RefusedError("wrong token")
        if request.get("namespace") is not None:
            namespace, job = check_namespace(_text(request, "namespace")), request.get("job")
            if not isinstance(job, str) or not 0 < len(job) <= 256:
                raise ValueError(f"job is {job!r:.40}, not a text of 1 to 256 characters")
            self._claim = self._vault.claim(namespace, job)
            self._namespace = namespace
        # The kernel tells no number of a process in a namespace that is not seen from here.
        self._owner = self._process.owner or str(request.get("process", ""))[:_PROCESS_CHARS_MAX]
        self.is_known = True
        return {"version": VERSION, "node": settings.own.name, "pid": os.getpid()}, ()

    def _do_prepare(self, request: Mapping[str, Any]) -> Reply:
        def is_wanted() -> bool:
            return not self._listener.is_closing

        # A save is begun while the last one is still held.
        self._vault.prepare(
            _whole(request, "num_bytes"), self._owner, num_segments=2, is_wanted=is_wanted
        )
        return {}, ()

    def _do_begin(self, request: Mapping[str, Any]) -> Reply:
        num_bytes, num_shards = _whole(request, "num_bytes"), _whole(request, "num_shards", 1)
        writing = self._house.room.begin(self._shard_id(request), num_bytes, owner=self._owner)
        segment = writing.segment
        self._writings[segment.number] = (writing, num_shards)
        is_new = segment.number not in self._given
        self._given.add(segment.number)
        return {"segment": segment.number, "size": segment.size_bytes, "is_new": is_new}, (
            writing.file,
        )

    def _do_commit(self, request: Mapping[str, Any]) -> Reply:
        number = _whole(request, "segment")
        if number not in self._writings:
            raise ValueError(f"segment {number} is not being written here")
        writing, num_shards = self._writings.pop(number)
        with writing:
            meta = read_meta(request.get("meta"))
            if meta.num_shards != num_shards:
                raise ValueError(f"{meta.num_shards} shards, where {num_shards} were begun")
            writing.commit(meta)
        return self._peers(), ()

    def _peers(self) -> dict[str, Any]:
        """Return in how many failure domains a shard can be now, and whose names are unknown."""
        board = self._house.board
        num = count_domains(board.living(), keepers=board.settings.keepers)
        return {"num_domains": num, "nameless": list(board.peers.nameless())}

    def _do_abort(self, request: Mapping[str, Any]) -> Reply:
        writing, _ = self._writings.pop(_whole(request, "segment"), (None, 0))
        if writing is not None:
            writing.abort()
        return {}, ()

    def _do_steps(self, request: Mapping[str, Any]) -> Reply:
        rows = [
            {
                "step": each.at.step,
                "generation": each.at.generation,
                "num_shards": each.num_shards,
                "shards": sorted(each.copies),
            }
            for each in self._house.offer.steps(self._own_namespace())
        ]
        return {"steps": rows, **self._peers()}, ()

    def _do_known(self, request: Mapping[str, Any]) -> Reply:
        """Tell of unfinished steps, too: a save is not to be taken for one of those."""
        return {"known": self._house.offer.known(self._own_namespace())}, ()

    def _do_find(self, request: Mapping[str, Any]) -> Reply:
        """Tell what this node alone has of a shard."""
        shard_id = self._shard_id(request)
        is_being_written = self._vault.is_being_written(shard_id)
        meta = self._vault.find(shard_id)  # after that: who has ended meanwhile has left it
        digest = None if meta is None else content_digest(meta)
        return {"digest": digest, "is_being_written": is_being_written}, ()

    def _do_read(self, request: Mapping[str, Any]) -> Reply:
        shard_id = self._shard_id(request)
        try:
            source, reading = self._house.offer.bring(shard_id)
        except KeyError:
            raise KeyError(f"{show(shard_id)} is not held") from None
        try:
            file = reading.file
        except OSError:
            reading.close()
            raise
        segment = reading.segment
        self._readings.setdefault(segment.number, []).append(reading)
        return {
            "segment": segment.number,
            "size": segment.size_bytes,
            "meta": reading.meta,
            "source": source,
        }, (file,)

    def _do_release(self, request: Mapping[str, Any]) -> Reply:
        number = _whole(request, "segment")
        readings = self._readings.get(number, [])
        if readings:
            readings.pop().close()
        if not readings:
            self._readings.pop(number, None)
        return {}, ()

    def _do_bad(self, request: Mapping[str, Any]) -> Reply:
        """Hash it again: a worker whose own memory is at fault must not cost a good copy."""
        readings = self._readings.get(_whole(request, "segment"), [])
        if not readings:
            raise ValueError("the segment is not being read here")
        try:
            return {"is_dropped": not self._vault.check(readings[-1].meta.id)}, ()
        except KeyError:
            return {"is_dropped": True}, ()

    def _do_go_back(self, request: Mapping[str, Any]) -> Reply:
        """Note a run that goes on from a step; without one, only tell where the newest did."""
        namespace, first = self._own_namespace(), None
        if "step" not in request:
            _, runs = self._vault.runs().get(namespace, (None, {}))
            return {"run": max(runs.items(), default=None)}, ()
        if request.get("first_generation") is not None:
            first = _whole(request, "first_generation")
        number = self._house.board.go_back(namespace, _whole(request, "step"), first)
        return {"first_generation": number}, ()

    def _do_flush(self, request: Mapping[str, Any]) -> Reply:
        step, generation = _whole(request, "step"), _whole(request, "generation")
        self._house.board.flush(self._own_namespace(), StepAt(step=step, generation=generation))
        return {}, ()

    def _do_own(self, request: Mapping[str, Any]) -> Reply:
        """Have the store's namespace be the run's own; waits for the store."""
        namespace, shelf = self._own_namespace(), self._house.board.shelf
        told = {name: request.get(name) for name in NamespaceOwner.model_fields}
        owner = read_record(NamespaceOwner, told, "owner of a namespace")
        takes_over, unseen = bool(request.get("takes_over")), list[str]()
        if shelf is not None:
            unseen = shelf.claim(namespace, owner, takes_over=takes_over)
            try:
                self._vault.own(namespace, owner)
            except VaultFullError as error:
                # The store knows it; what is lost is that the node's next daemon does.
                complain(f"whose the namespace {namespace!r} is cannot be kept: {error}")
        return {"unseen": unseen}, ()

    def _do_status(self, request: Mapping[str, Any]) -> Reply:
        own = self._house.settings.own
        return describe_vault(self._vault) | {
            "node": own.name,
            "domain": own.domain,
            "pid": os.getpid(),
            "num_connections": self._listener.num_open,
            **self._house.describe(),
        }, ()

    def _do_supervise(self, request: Mapping[str, Any]) -> Reply:
        """Hold the lease for an agent, unless it would have started another daemon than this."""
        is_same = request.get("arguments") == list(self._house.settings.arguments)
        if is_same:
            self._house.lease.take(self, self._lose)
            self.is_supervisor = True
        return {"is_same": is_same}, ()

    def _do_news(self, request: Mapping[str, Any]) -> Reply:
        """Wait until the store is not as it was at this number, or something else is asked."""
        room, number = self._house.newsroom, _whole(request, "number")
        if room is None:
            return {"number": number, "store": None}, ()
        if number:
            with room.waiting(number) as file:
                self._process.wait_also(file)
        number, news = room.tell()
        return {"number": number, "store": news.model_dump()}, ()

    def last_news(self) -> dict[str, Any] | None:
        """Return how the store does as the daemon ends, for the agent that supervises it."""
        room = self._house.newsroom
        if room is None or not self.is_supervisor:
            return None
        number, news = room.tell()
        return {"number": number, "store": news.model_dump(), "is_last": True}

    def _own_namespace(self) -> str:
        if not self._namespace:
            raise ValueError("this connection has no namespace")
        return self._namespace

    def _shard_id(self, request: Mapping[str, Any]) -> ShardId:
        shard_id = ShardId(
            namespace=self._own_namespace(),
            step=_whole(request, "step"),
            generation=_whole(request, "generation", -1),
            shard=_text(request, "shard"),
        )
        # What could not be written to a lower tier is not taken.
        step_key(shard_id)
        return shard_id


def _whole(request: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _NUMBER_MAX:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number of at least {least}")
    return value


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}, not a text")  # noqa: TRY004 - a wrong value
    return value

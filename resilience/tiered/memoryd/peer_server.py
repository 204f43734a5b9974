"""The other end of the connections between daemons: takes what others hold and send."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from resilience.runtime.records import read_record
from resilience.tiered.errors import RefusedError, TieredError
from resilience.tiered.frames import FRAME_BYTES_MAX, describe_error, find_answer
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.memoryd.listener import Listener
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peer_house import HELLO_TIMEOUT_S, PeerHouse
from resilience.tiered.memoryd.peer_wire import (
    REPLY_TIMEOUT_S,
    VERSION,
    PeerSocket,
    check_address,
    check_id,
    describe_shard,
    read_complete,
    read_copies,
    read_id,
    read_ids,
    read_shard,
    receive_shard,
    step_back,
)
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardMeta, content_digest
from resilience.tiered.vault import show

_HELLO_BYTES_MAX = 64 << 10
_IDLE_S = 60.0
"""How long a connection that is no link may wait for its next request."""
OWNER = "peers"
"""Who has the memory of what comes from other nodes."""


class PeerSession:
    """One connection of another daemon. One thread."""

    def __init__(self, house: PeerHouse, connection: PeerSocket, listener: Listener) -> None:
        self._house = house
        self._connection = connection
        self._listener = listener
        self._peer = ""
        self._is_link = False
        self._is_over = False

    def serve(self) -> None:
        """Answer until the connection ends."""
        try:
            with suppress(OSError):  # the other side is gone or too slow: nobody to tell
                if not self._greet():
                    return
                idle_s = self._house.settings.gone_s if self._is_link else _IDLE_S
                while not self._listener.is_closing and not self._is_over:
                    self._answer_next(idle_s)
        finally:
            if self._is_link:
                self._house.directory.leave(self._peer, self, is_end=self._is_over)

    def _greet(self) -> bool:
        """Take the first frame; says whether it is one of another node."""
        connection = self._connection
        try:
            frame = connection.receive(timeout_s=HELLO_TIMEOUT_S, bytes_max=_HELLO_BYTES_MAX)
            reply = self._hello(frame.message)
        except (TieredError, ValueError) as error:
            connection.send(describe_error(error), timeout_s=HELLO_TIMEOUT_S)
            return False
        connection.send(reply, timeout_s=HELLO_TIMEOUT_S)
        return True

    def _hello(self, message: Mapping[str, Any]) -> dict[str, Any]:
        settings = self._house.settings
        if message.get("op") != "hello":
            raise RefusedError("the first request has to be hello")
        if message.get("version") != VERSION:
            raise RefusedError(f"version {message.get('version')!r:.40}, where {VERSION} is spoken")
        node = read_record(Node, message.get("node"), "node")
        name, boot = node.name, read_record(str, message.get("boot"), "boot")
        check_address(node.address)
        if self._house.directory.find(name) is None:
            if not node.address or name == settings.own.name:
                raise RefusedError(f"node {name!r:.80} is none of the peers that are known here")
            self._house.on_stranger(node)
        if message.get("is_link"):
            self._house.directory.enter(node, boot, self)
            self._is_link = True
            step_back()
            self._house.on_peer(name)
        self._peer = name
        return {"node": settings.own.name, "version": VERSION}

    def _answer_next(self, idle_s: float) -> None:
        try:
            frame = self._connection.receive(timeout_s=idle_s, bytes_max=FRAME_BYTES_MAX)
        except ValueError as error:
            # Where the next frame begins is not known.
            self._connection.send(describe_error(error), timeout_s=REPLY_TIMEOUT_S)
            raise ConnectionError(str(error)) from error
        self._house.directory.hear(self._peer)
        try:
            reply = find_answer(self, frame.message)(frame.message)
        except (TieredError, KeyError, ValueError) as error:
            reply = describe_error(error)
        if reply is not None:
            self._connection.send(reply, timeout_s=REPLY_TIMEOUT_S)

    def _do_ping(self, message: Mapping[str, Any]) -> dict[str, Any]:
        del message
        if self._is_link:
            self._house.directory.check_session(self._peer)
        return {}

    def _do_inventory(self, message: Mapping[str, Any]) -> dict[str, Any]:
        copies = read_copies(message.get("copies"), self._peer)
        directory = self._house.directory
        directory.note_jobs(self._peer, read_record(dict[str, str], message.get("jobs"), "jobs"))
        directory.take(
            self._peer,
            self,
            copies,
            is_first=bool(message.get("is_first")),
            is_last=bool(message.get("is_last")),
        )
        directory.lose(self._peer, read_ids(message.get("lost", [])))
        return {}

    def _do_changes(self, message: Mapping[str, Any]) -> dict[str, Any]:
        copies = read_copies(message.get("copies"), self._peer)
        gone = read_ids(message.get("gone"))
        directory = self._house.directory
        directory.note_jobs(self._peer, read_record(dict[str, str], message.get("jobs"), "jobs"))
        if "complete" in message:
            directory.note_complete(self._peer, self, read_complete(message["complete"]))
        directory.change(self._peer, self, copies, gone)
        directory.lose(self._peer, read_ids(message.get("lost", [])))
        return {}

    def _do_check(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Hash a shard again that somebody has got damaged; it may have been the way."""
        shard_id = read_id(message.get("shard"))
        is_intact = self._house.vault.check(shard_id)
        if not is_intact:
            complain(f"{show(shard_id)} is damaged here and was dropped")
        return {"is_intact": is_intact}

    def _do_drop(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Drop a shard of the HTTP door that a client has deleted."""
        shard_id = read_id(message.get("shard"))
        if not shard_id.namespace.startswith(HTTP_PREFIX):
            raise ValueError("only the HTTP door deletes shards")
        return {"is_dropped": self._house.vault.drop(shard_id)}

    def _do_notes(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not self._is_link:
            raise ValueError("only a link may send notes")
        if known := self._house.notes:
            known.hear(self._peer, message.get("notes"))
        return {}

    def _do_bye(self, message: Mapping[str, Any]) -> dict[str, Any]:
        del message
        self._is_over = True
        return {}

    def _do_push(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take a shard; None where it did not come intact, which is said already."""
        if not self._is_link:
            raise ValueError("only a link may push")
        house = self._house
        meta, origin = (
            read_shard(message.get("shard")),
            read_record(str, message.get("origin"), "origin"),
        )
        check_id(meta.id)
        with ExitStack() as stack:
            self._claim(stack, meta, message.get("job"))
            held = house.vault.find(meta.id)
            if held is not None and content_digest(held) == content_digest(meta):
                if house.is_passing(meta.id):
                    self._note(meta, origin)
                house.note_taken(self._peer, meta.id)
                return {"is_held": True}
            with house.directory.busy(self._peer):
                if house.vault.adopt(meta):
                    self._note(meta, origin)
                    house.note_taken(self._peer, meta.id)
                    return {"is_held": True}
                writing = house.begin(meta.id, meta.num_bytes, owner=OWNER, is_copy=True)
            stack.enter_context(writing)
            self._connection.send({"is_held": False}, timeout_s=REPLY_TIMEOUT_S)
            if not receive_shard(self._connection, writing.memory, meta, self._hear):
                complain(f"a shard did not come intact from node {self._peer}")
                return None
            with house.directory.busy(self._peer):
                self._note(meta, origin)
                writing.commit(meta)
                self._drop_older(meta)
        house.note_taken(self._peer, meta.id)
        return {}

    def _claim(self, stack: ExitStack, meta: ShardMeta, job: object) -> None:
        """Take the namespace for the shard's job; raises RefusedError where another has it."""
        namespace = meta.id.namespace
        own = self._house.vault.job_of(namespace)
        if isinstance(job, str) and job:
            stack.callback(self._house.vault.claim(namespace, job).close)
        elif own is not None:
            raise RefusedError(f"the namespace {namespace!r} belongs to the job {own!r}")

    def _note(self, meta: ShardMeta, origin: str) -> None:
        held = {each.id for each in self._house.vault.metas()}
        self._house.origins.note(meta.id, origin, held)
        self._house.directory.notify()
        self._house.directory.wake()

    def _drop_older(self, meta: ShardMeta) -> None:
        """Drop copies of the HTTP door's that their writer's node has dropped for newer ones."""
        name = meta.id.namespace
        if not name.startswith(HTTP_PREFIX):
            return
        there = [
            each.meta_id.step
            for each in self._house.directory.copies({})
            if each.place == self._peer
            and (each.meta_id.namespace, each.meta_id.shard) == (name, meta.id.shard)
        ]
        for each in self._house.vault.metas():
            if (
                (each.id.namespace, each.id.shard) == (name, meta.id.shard)
                and self._house.origins.of(each.id) == self._peer
                and each.id.step < min(there, default=0)
            ):
                self._house.vault.drop(each.id)

    def _hear(self) -> None:
        self._house.directory.hear(self._peer)

    def _do_fetch(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a shard; the connection ends where the other side does not want the rest."""
        shard_id = read_id(message.get("shard"))
        own, job = self._house.vault.job_of(shard_id.namespace), message.get("job")
        if job is not None and own not in (None, job):
            raise RefusedError(f"the namespace {shard_id.namespace!r} belongs to the job {own!r}")
        with self._house.vault.read(shard_id) as reading:
            num_bytes = reading.meta.num_bytes
            self._connection.send(
                {"shard": describe_shard(reading.meta)}, timeout_s=REPLY_TIMEOUT_S
            )
            deadline_s = self._connection.begin_bytes(num_bytes)
            self._connection.send_bytes(reading, 0, num_bytes, deadline_s)
            # Until then its pages may lie in the socket.
            self._connection.receive(timeout_s=_IDLE_S, bytes_max=_HELLO_BYTES_MAX)
        return None


def serve_peer(house: PeerHouse, listener: Listener, accepted: socket.socket) -> None:
    """Serve one connection of another daemon to its end; in a thread of its own."""
    with suppress(OSError):
        peer = PeerSocket(accepted, stall_s=house.settings.gone_s)
        PeerSession(house, peer, listener).serve()

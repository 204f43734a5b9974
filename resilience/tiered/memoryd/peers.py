"""The door between daemons: each shard is soon on other nodes too, and comes back from there.

Each daemon keeps a connection to each other one. Over it, it says what it holds, is heard
of while there is nothing to say, and sends what placement wants the other to have. What it
receives over the connections of the others tells it who is there and what they hold.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from resilience.arguments import NAMELESS_S, is_loopback
from resilience.runtime.tls import explain_tls
from resilience.tiered.catalog import Copy
from resilience.tiered.errors import LostError, RefusedError, TieredError
from resilience.tiered.frames import raise_error
from resilience.tiered.memoryd.listener import Listener, listen_at
from resilience.tiered.memoryd.notes import BoardNotes
from resilience.tiered.memoryd.peer_house import Begin, Complete, PeerHouse
from resilience.tiered.memoryd.peer_link import Link
from resilience.tiered.memoryd.peer_options import PEERS_MAX, PeerSettings
from resilience.tiered.memoryd.peer_origins import Origins
from resilience.tiered.memoryd.peer_server import serve_peer
from resilience.tiered.memoryd.peer_wire import REPLY_TIMEOUT_S, PeerSocket, read_shard
from resilience.tiered.memoryd.peering import OnPiece, Peers
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId, ShardMeta, piece_bounds
from resilience.tiered.vault import Vault

_CLOSE_TIMEOUT_S = 4.0
_LISTENER_CLOSE_S = 5.0
_CONNECTIONS_MAX, _CONNECTIONS_PEER = 64, 16
"""So many connections may be there in all, and so many more for each other node."""
_LOOK_S = 0.5
_IDLE_MAX = 4
"""How many connections to one node are kept for the next fetch."""


class PeerDoor(Peers):
    """The daemons of the other nodes, from `start` to `close`.

    `folder` keeps the list of copies: the arena's. Raises OSError where the address cannot be used,
    in `start`.
    """

    is_alone = False

    def __init__(self, vault: Vault, folder: Path, settings: PeerSettings) -> None:
        if not settings.token and not is_loopback(settings.listen[0]):
            raise OSError(
                f"{settings.listen[0]!r} can be reached from other machines, which needs a token"
            )
        super().__init__(settings.peers, settings.gone_s)
        self._house = PeerHouse(
            vault=vault,
            settings=settings,
            directory=self._directory,
            origins=Origins(folder),
            begin=vault.begin,
            on_peer=self._retry,
            on_stranger=self._meet,
        )
        self._links = {each.name: Link(self._house, each.name) for each in settings.peers}
        self._listener = Listener(
            "peer",
            self._serve,
            complaint="cannot accept connections of other nodes",
            connections_max=_CONNECTIONS_MAX + _CONNECTIONS_PEER * max(1, len(settings.peers)),
            lead=self._house.credentials.accept,
        )
        self._lock = threading.Lock()
        self._idle: dict[str, list[PeerSocket]] = defaultdict(list)
        self._is_closed = False

    def connect_board(self, begin: Begin, complete: Complete, notes: BoardNotes) -> None:
        """Begin copies this way, and let the others know these steps and notes, from `start` on."""
        self._house.begin, self._house.complete, self._house.notes = begin, complete, notes

    def wake(self) -> None:
        """Look again at what the others are to know; any thread."""
        with self._lock:
            self._house.num_notes += 1
        self._directory.wake()

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until the others have heard the notes; see `peering.Peers`."""
        house = self._house
        target, told = house.num_notes, house.num_told
        end_s, seen = time.monotonic() + timeout_s, -1
        # Who is heard, but cannot be connected to, is never told.
        while any(
            told.get(name, -1) < target
            for name in self._directory.living()
            if name not in house.unreachable
        ):
            rest_s = end_s - time.monotonic()
            if rest_s <= 0 or self._is_closed:
                return False
            # Who is gone meanwhile is not waited for.
            seen = self._directory.wait(seen, min(rest_s, _LOOK_S))
        return True

    def start(self) -> None:
        """Listen, and begin to connect."""
        house = self._house
        before = house.vault.on_change

        def tell() -> None:
            before()
            self._directory.wake()

        house.vault.on_change = tell
        host, port = house.settings.listen
        try:
            listening = listen_at(host, port)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self._listener.start(listening)
        for each in self._links.values():
            each.start()

    def close(self) -> None:
        """End all connections; the others are told."""
        with self._lock:
            self._is_closed = True
            idle = [each for group in self._idle.values() for each in group]
            self._idle.clear()
            links = list(self._links.values())
        for connection in idle:
            connection.close()
        self._directory.close()
        for link in links:
            link.close()
        self._directory.wake()
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for link in links:
            link.join(end_s - _CLOSE_TIMEOUT_S / 2, end_s)
        self._listener.close(_LISTENER_CLOSE_S)

    def copies(self) -> Sequence[Copy]:
        """Return what other living nodes have in memory, as they last said."""
        return self._directory.copies(self._house.jobs())

    def nameless(self) -> Sequence[str]:
        """Return the addresses whose names do not resolve for NAMELESS_S."""
        before_s, found = time.monotonic() - NAMELESS_S, self._house.nameless.copy()
        return sorted(address for address, since_s in found.items() if since_s <= before_s)

    def is_passing(self, shard_id: ShardId) -> bool:
        """Return whether this node holds a shard only until others keep it instead."""
        return self._house.is_passing(shard_id)

    def fetch(self, copy: Copy, into: memoryview, on_piece: OnPiece) -> ShardMeta:
        """Fill `into` from the node that has the copy; see `peering.Peers`."""
        node = self._node(copy.place)
        message = {
            "op": "fetch",
            "shard": copy.meta_id,
            "job": self._house.vault.job_of(copy.meta_id.namespace),
        }
        try:
            connection, reply = self._ask(node, message)
            meta = read_shard(reply.get("shard"))
        except (OSError, ValueError) as error:
            raise LostError(f"node {node.name} is gone: {explain_tls(error)}") from error
        try:
            self._fill(connection, copy, meta, into, on_piece)
        except BaseException:
            connection.close()
            raise
        self._keep(node, connection)
        return meta

    def doubt(self, copy: Copy) -> None:
        """Let a node look whether a copy is intact; see `peering.Peers`."""
        self._tell(self._node(copy.place), {"op": "check", "shard": copy.meta_id})

    def drop(self, shard_ids: Sequence[ShardId]) -> None:
        """Let the others drop shards; see `peering.Peers`."""
        for name in self._directory.living():
            for each in shard_ids:
                self._tell(self._node(name), {"op": "drop", "shard": each})

    def _tell(self, node: Node, message: Mapping[str, object]) -> None:
        """Ask a node for something; what it answers, and whether it does, makes no difference."""
        with suppress(OSError, ValueError, KeyError, TieredError):
            connection, _ = self._ask(node, message)
            self._keep(node, connection)

    def _node(self, name: str) -> Node:
        node = self._directory.find(name)
        if node is None:
            raise LostError(f"node {name} is not known here")
        return node

    def _ask(
        self, node: Node, message: Mapping[str, object]
    ) -> tuple[PeerSocket, Mapping[str, object]]:
        """Return a node's answer, and the connection over which it came."""
        while True:
            with self._lock:
                idle = self._idle[node.name]
                connection = idle.pop() if idle else None
            is_new = connection is None
            connection = connection or self._house.dial(node, is_link=False)
            try:
                connection.send(message, timeout_s=REPLY_TIMEOUT_S)
                reply = connection.receive(timeout_s=REPLY_TIMEOUT_S).message
            except (OSError, ValueError):
                connection.close()
                if is_new:
                    raise
                continue  # it was kept, and the daemon there has ended since
            try:
                raise_error(reply)
            except (TieredError, KeyError, ValueError):
                self._keep(node, connection)
                raise
            return connection, reply

    def _fill(
        self,
        connection: PeerSocket,
        copy: Copy,
        meta: ShardMeta,
        into: memoryview,
        on_piece: OnPiece,
    ) -> None:
        if meta.id != copy.meta_id or not meta.num_bytes == copy.num_bytes == len(into):
            raise LostError(f"node {copy.place} has sent another shard than was asked for")
        deadline_s = connection.begin_bytes(meta.num_bytes)
        try:
            for number, (begin, end) in enumerate(piece_bounds(meta.num_bytes)):
                connection.fill(into[begin:end], deadline_s)
                on_piece(meta, number)
            connection.send({"op": "done"}, timeout_s=REPLY_TIMEOUT_S)
        except OSError as error:
            raise LostError(f"node {copy.place} is gone: {explain_tls(error)}") from error

    def _keep(self, node: Node, connection: PeerSocket) -> None:
        with self._lock:
            idle = self._idle[node.name]
            if not self._is_closed and len(idle) < _IDLE_MAX:
                idle.append(connection)
                return
        connection.close()

    def _serve(self, accepted: socket.socket) -> None:
        serve_peer(self._house, self._listener, accepted)

    def _meet(self, node: Node) -> None:
        """Take a node for a peer that was started after this one, and connect to it, too."""
        if len(self._links) >= PEERS_MAX:
            raise RefusedError(f"no room for node {node.name}: this one knows {PEERS_MAX}")
        self._directory.add(node)
        with self._lock:
            # Another connection of it may have been quicker.
            if self._is_closed or node.name in self._links:
                return
            link = self._links[node.name] = Link(self._house, node.name)
            link.start()
        self._listener.widen(_CONNECTIONS_PEER)

    def _retry(self, name: str) -> None:
        if link := self._links.get(name):
            link.retry()

"""The door for processes of this node: a Unix socket that hands over the memory itself.

A worker is given the descriptor of a segment, fills it through its own mapping and
commits: its bytes are copied once. Each connection has a thread, which blocks until the
worker asks for something, ends, or is silent for too long.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from resilience.tiered.errors import LostError
from resilience.tiered.frames import FRAME_BYTES_MAX, FrameSocket, describe_error
from resilience.tiered.memoryd.board import Board, Own
from resilience.tiered.memoryd.lease import Lease
from resilience.tiered.memoryd.offer import Offer, VaultOffer
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.session import (
    Begin,
    Describe,
    Flush,
    GoBack,
    House,
    LocalSettings,
    Peer,
    Session,
)
from resilience.tiered.uploads import Settings
from resilience.tiered.vault import Vault

SOCKET_NAME = "memoryd.sock"
"""The socket's name in the arena's folder."""

_HELLO_TIMEOUT_S = 10.0
_HELLO_BYTES_MAX = 64 << 10
_FRAME_TIMEOUT_S = 30.0
"""How long a frame may take from its first byte to its last, either way."""
_CLOSE_TIMEOUT_S = 10.0


class LocalDoor:
    """Serves a vault on a Unix socket of mode 0600. Has threads of its own.

    A process that ends leaves nothing behind: what it was writing was never there, and its
    segments are free again; those of one that only lost its connection, and may still
    write, are not used again.
    """

    def __init__(
        self,
        vault: Vault,
        path: Path,
        settings: LocalSettings | None = None,
        *,
        offer: Offer | None = None,
        begin: Begin | None = None,
        go_back: GoBack | None = None,
        flush: Flush | None = None,
        describe: Describe = dict,
        lease: Lease | None = None,
    ) -> None:
        board = Board(vault, Own(node="", domain=""), Settings())
        self._house = House(
            vault=vault,
            offer=offer or VaultOffer(vault),
            settings=settings or LocalSettings(),
            count_connections=lambda: len(self._connections),
            begin=begin or vault.begin,
            go_back=go_back or board.go_back,
            flush=flush or board.flush,
            describe=describe,
            lease=lease or Lease(),
        )
        self._path = path
        self._lock = threading.Lock()
        self._connections: dict[FrameSocket, threading.Thread] = {}
        self._is_closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._accept, name="local-door", daemon=True)

    def start(self) -> None:
        """Begin to listen; OSError where the path cannot be used.

        A socket that was left there is removed: whoever has the arena's lock owns it.
        """
        try:
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
            self._path.chmod(0o600)  # nobody can connect before listen
            self._listener.listen(1024)
        except OSError as error:
            raise OSError(f"cannot listen on {self._path}: {error}") from error
        self._thread.start()

    def close(self) -> None:
        """End all connections and remove the socket; waits at most 10 s for what is in hand."""
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._is_closed.set()
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # it was never started
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for connection, _ in connections:
            connection.shut_down()
        for _, thread in connections:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError as error:
                # Without descriptors the next try fails at once; some may be closed in a second.
                if not self._is_closed.wait(1.0):
                    complain(f"cannot accept: {error}")
                continue
            self._admit(FrameSocket(accepted))

    def _admit(self, connection: FrameSocket) -> None:
        if self._give_thread(connection):
            return
        limit = self._house.settings.connections_max
        error = LostError(f"the daemon has no room for another connection; it takes {limit}")
        with suppress(OSError):
            # Into the empty buffer of a new socket: this does not wait.
            connection.send(describe_error(error), timeout_s=1.0)
        connection.close()

    def _give_thread(self, connection: FrameSocket) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="local-connection", daemon=True
        )
        with self._lock:
            if len(self._connections) >= self._house.settings.connections_max:
                return False
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                return False
            self._connections[connection] = thread
            return True

    def _serve(self, connection: FrameSocket) -> None:
        try:
            with Peer(connection.socket) as peer:
                session = Session(self._house, peer, lambda: _hang_up(connection))
                try:
                    self._answer_all(connection, peer, session)
                finally:
                    session.close()
        except Exception:  # noqa: BLE001 - one connection's fault is not the daemon's
            complain(traceback.format_exc())
        finally:
            connection.close()
            with self._lock:
                del self._connections[connection]

    def _answer_all(self, connection: FrameSocket, peer: Peer, session: Session) -> None:
        """Answer until the connection ends."""
        idle_s: float | None = _HELLO_TIMEOUT_S
        bytes_max = _HELLO_BYTES_MAX
        with suppress(OSError):  # the other side is gone or too slow: nobody to tell
            while not self._is_closed.is_set() and peer.waits_for_answer(idle_s):
                try:
                    frame = connection.receive(timeout_s=_FRAME_TIMEOUT_S, bytes_max=bytes_max)
                except ValueError as error:
                    # Where the next frame begins is not known.
                    connection.send(describe_error(error), timeout_s=_FRAME_TIMEOUT_S)
                    return
                message, files = session.answer(frame.message)
                try:
                    connection.send(message, timeout_s=_FRAME_TIMEOUT_S, files=files)
                except ValueError as error:  # too long, so nothing of it was sent
                    connection.send(describe_error(error), timeout_s=_FRAME_TIMEOUT_S)
                if not session.is_known:
                    return
                idle_s = None if session.is_supervisor else self._house.settings.idle_s
                bytes_max = FRAME_BYTES_MAX


def _hang_up(connection: FrameSocket) -> None:
    """Tell an agent that another one supervises the daemon now."""
    with suppress(OSError):
        connection.send({"is_taken_over": True}, timeout_s=_HELLO_TIMEOUT_S)
    connection.shut_down()

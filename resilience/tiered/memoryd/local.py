"""The door for processes of this node: a Unix socket that hands over the memory itself.

A worker is given the descriptor of a segment, fills it through its own mapping and
commits: its bytes are copied once. Each connection has a thread, which blocks until the
worker asks for something, ends, or is silent for too long.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from resilience.runtime.server import BACKLOG
from resilience.tiered.errors import LostError
from resilience.tiered.frames import FRAME_BYTES_MAX, FrameSocket, describe_error
from resilience.tiered.memoryd.listener import Listener
from resilience.tiered.memoryd.session import ClientProcess, House, Session

SOCKET_NAME = "memoryd.sock"
"""The socket's name in the arena's folder."""

_HELLO_TIMEOUT_S = 10.0
_HELLO_BYTES_MAX = 64 << 10
_FRAME_TIMEOUT_S = 30.0
"""How long a frame may take from its first byte to its last, either way."""


class LocalDoor:
    """Serves a vault on a Unix socket of mode 0600. Has threads of its own.

    A process that ends leaves nothing behind: what it was writing was never there, and its
    segments are free again; those of one that only lost its connection, and may still
    write, are not used again.
    """

    def __init__(self, house: House, path: Path) -> None:
        self._house = house
        self._path = path
        self._listener = Listener(
            "local",
            self._serve,
            complaint="cannot accept",
            connections_max=house.settings.connections_max,
            refuse=self._refuse,
        )

    def start(self) -> None:
        """Begin to listen; OSError where the path cannot be used.

        A socket that was left there is removed: whoever has the arena's lock owns it.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            listening.bind(str(self._path))
            self._path.chmod(0o600)  # nobody can connect before listen
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise OSError(f"cannot listen on {self._path}: {error}") from error
        self._listener.start(listening)

    def close(self) -> None:
        """End all connections and remove the socket; waits at most 10 s for what is in hand."""
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _refuse(self, connection: socket.socket) -> None:
        limit = self._house.settings.connections_max
        error = LostError(f"the daemon has no room for another connection; it takes {limit}")
        # Into the empty buffer of a new socket: this does not wait.
        FrameSocket(connection).send(describe_error(error), timeout_s=1.0)

    def _serve(self, accepted: socket.socket) -> None:
        connection = FrameSocket(accepted)
        with ClientProcess(accepted) as process:
            session = Session(self._house, process, self._listener, lambda: _hang_up(connection))
            try:
                self._answer_all(connection, process, session)
            finally:
                session.close()

    def _answer_all(
        self, connection: FrameSocket, process: ClientProcess, session: Session
    ) -> None:
        """Answer until the connection ends."""
        idle_s: float | None = _HELLO_TIMEOUT_S
        bytes_max = _HELLO_BYTES_MAX
        with suppress(OSError):  # the other side is gone or too slow: nobody to tell
            # The end of all shuts the connection down, which wakes this wait, too.
            while process.waits_for_answer(idle_s) and not self._listener.is_closing:
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
            if self._listener.is_closing and (news := session.last_news()):
                connection.send(news, timeout_s=_FRAME_TIMEOUT_S)


def _hang_up(connection: FrameSocket) -> None:
    """Tell an agent that another one supervises the daemon now."""
    with suppress(OSError):
        connection.send({"is_taken_over": True}, timeout_s=_HELLO_TIMEOUT_S)
    connection.shut_down()

"""An agent's side of the local door: a connection held as a lease.

As long as it is open the daemon has an agent. Only the newest agent of a node supervises it. On it
the daemon says whenever something of its store changes.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from resilience.tiered.frames import FrameSocket, check_owner, read_peer

_FRAME_TIMEOUT_S = 1.0
"""How long a frame may take from its first byte to its last; it comes in one piece."""
_FRAME_BYTES_MAX = 1 << 16


class Supervisor:
    """One connection, on which the hello and what follows it are said at once."""

    def __init__(
        self, path: Path, *, token: str, node: str, arguments: Sequence[str] | None
    ) -> None:
        """Connect; with the daemon's `arguments` ask to supervise it, without only whether it is.

        Raises OSError where nobody listens, RefusedError where somebody else does.
        """
        requests: list[dict[str, Any]] = [{"op": "hello", "token": token, "node": node}]
        if arguments is not None:
            requests.append({"op": "supervise", "arguments": list(arguments)})
        self.num_answers = len(requests)
        with ExitStack() as opened:
            self._socket = opened.enter_context(socket.socket(socket.AF_UNIX))
            self._socket.settimeout(0.0)
            self._socket.connect(str(path))
            check_owner(self._socket, path)
            self._frames = FrameSocket(self._socket)
            for each in requests:
                # Into the empty buffer of a new socket: this does not wait.
                self._frames.send(each, timeout_s=_FRAME_TIMEOUT_S)
            opened.pop_all()

    def fileno(self) -> int:
        """Return what becomes readable when the daemon says something."""
        return self._socket.fileno()

    def open_process(self) -> int | None:
        """Return a descriptor of the daemon's process, the caller's own; None for one that is gone.

        Only where it has answered meanwhile is it surely the daemon's.
        """
        try:
            return os.pidfd_open(read_peer(self._socket)[0])
        except OSError:
            return None

    def ask_news(self, number: int) -> None:
        """Ask for what is newer of the store than this; 0: for what there is. Raises OSError.

        A question before the last one is answered has that one answered at once.
        """
        # Two at most are in the buffer of the socket: this does not wait.
        self._frames.send({"op": "news", "number": number}, timeout_s=_FRAME_TIMEOUT_S)
        self.num_answers += 1

    @property
    def has_words(self) -> bool:
        """Return whether there is something to read, or the daemon says no more."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def read(self) -> dict[str, Any] | None:
        """Return what the daemon says, once there is something; None where it says no more."""
        try:
            frame = self._frames.receive(timeout_s=_FRAME_TIMEOUT_S, bytes_max=_FRAME_BYTES_MAX)
        except (OSError, ValueError):
            return None
        if not (frame.message.get("is_taken_over") or frame.message.get("is_last")):
            self.num_answers -= 1
        return frame.message

    def close(self) -> None:
        """Let go of the daemon, whose lease then counts."""
        self._frames.close()

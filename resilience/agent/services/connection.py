"""An agent's side of the local door: a connection that never blocks, held as a lease.

As long as it is open the daemon has an agent. Only the newest agent of a node supervises it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilience.tiered.errors import RefusedError
from resilience.tiered.frames import check_owner

_LENGTH = struct.Struct(">I")
_FRAME_BYTES_MAX = 1 << 16


class Supervisor:
    """One connection, on which the hello and what follows it are said at once."""

    def __init__(
        self, path: Path, *, token: str, node: str, arguments: Sequence[str] | None
    ) -> None:
        """Connect; with the daemon's `arguments` ask to supervise it, without only whether it is.

        Raises OSError where nobody listens, RefusedError where somebody else does.
        """
        self._rest = b""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.socket.connect(str(path))
            check_owner(self.socket, path)
            requests: list[dict[str, Any]] = [{"op": "hello", "token": token, "node": node}]
            if arguments is not None:
                requests.append({"op": "supervise", "arguments": list(arguments)})
            # Into the empty buffer of a new socket.
            self.socket.send(b"".join(map(_encode, requests)))
            self.num_answers = len(requests)
        except BaseException:
            self.socket.close()
            raise

    def fileno(self) -> int:
        """Return what becomes readable when the daemon says something."""
        return self.socket.fileno()

    def open_process(self) -> int | None:
        """Return a descriptor of the daemon's process, the caller's own; None for one that is gone.

        Only where it has answered meanwhile is it surely the daemon's.
        """
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("iII", credentials)
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None

    def read(self) -> list[dict[str, Any]] | None:
        """Return what the daemon has said since the last call; None where it says no more."""
        try:
            data = self.socket.recv(_FRAME_BYTES_MAX)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._rest += data
        messages = []
        while len(self._rest) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._rest)[0]
            if end > _FRAME_BYTES_MAX:
                return None
            if len(self._rest) < end:
                break
            try:
                message = json.loads(self._rest[_LENGTH.size : end])
            except ValueError:
                return None
            messages.append(message if isinstance(message, dict) else {})
            self._rest = self._rest[end:]
        return messages

    def close(self) -> None:
        """Let go of the daemon, whose lease then counts."""
        self.socket.close()


def _encode(message: dict[str, Any]) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _FRAME_BYTES_MAX - _LENGTH.size:
        raise RefusedError("the daemon's arguments are longer than 64 KiB")
    return _LENGTH.pack(len(data)) + data

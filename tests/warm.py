"""Start processes that have imported torch and our modules already, which else takes seconds.

They are what `python -m MODULE` is, but for that and for the seed of hashes, which those of one
process of tests have in common. Some tests start real ones, so that imports are tried as well.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.apart import apart

ROOT = Path(__file__).parents[1]
ROOM = "WARM_SERVER_ROOM"
"""The variable that makes room in the server for its children's environments."""
_ROOM_BYTES = 1 << 16


class Forked:
    """What `subprocess.Popen` is to who starts a process, of one that was forked elsewhere."""

    def __init__(self, pid: int, end: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._end = end

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self._take_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self._take_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take_end(self) -> None:
        text = os.read(self._end, 16)
        os.close(self._end)
        assert text, "the process that forks others has ended"
        self.returncode = int(text)


Process = subprocess.Popen[bytes] | Forked


def start(
    words: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    output: IO[bytes],
    is_real: bool = False,
    is_leader: bool = False,
    server: str = "tests.warm_server",
) -> Process:
    """Start `python -m MODULE ARGUMENTS` with all that it prints in one file.

    A leader has a session of its own.
    """
    if is_real:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=is_leader,
        )
    request = {
        "words": list(words),
        "environment": dict(environment),
        "folder": str(folder),
        "is_leader": is_leader,
    }
    return Forked(*fork(server, request, output.fileno(), output.fileno()))


def fork(server: str, request: Mapping[str, object], output: int, error: int) -> tuple[int, int]:
    """Have a server fork what a request asks for; returns its pid, and a file that tells its end.

    The server is a module that is run with `tests.forking`.
    """
    _, requests = _server(server)
    end, told = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(requests, [json.dumps(request).encode()], (told, nothing, output, error))
    for file in (told, nothing):
        os.close(file)
    answer = requests.recv(64)
    assert answer, "the process that forks others has ended"
    return int(answer), end


@functools.cache
def _server(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the server, which ends with this process: its socket does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, apart():
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                ROOM: "x" * _ROOM_BYTES,
            },
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    # Where the server has ended, nobody has the other end any more.
    assert ours.recv(64), "the process that forks others has not started"
    return process, ours

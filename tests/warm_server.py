"""A process that has imported what agents and workers need and forks them, for `tests.warm`.

It computes nothing and has one thread, which is what makes its children sound. It is run as
`python -m tests.warm_server FD`; FD is the socket that requests come by.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

import resilience.agent
from benchmarks import namespaces
from tests.forking import close_others, end_with, run_as, serve, show_environment

_PRELOADED = ("torch._dynamo", "recipes_training.preload")
_AGENT = "resilience.agent"
_ZYGOTE = [sys.executable, "-m", "resilience.agent.processes.zygote"]
_REQUEST_BYTES_MAX = 1 << 18
_FILES_MAX = 64
_FIRST_FILE = 512
_LINK = "--operator-link"


def _preload() -> None:
    """Import what an agent, its zygote and its workers import."""
    for name in _PRELOADED:
        importlib.import_module(name)
    for each in pkgutil.walk_packages(resilience.agent.__path__, "resilience.agent."):
        if not each.name.endswith("__main__"):
            importlib.import_module(each.name)
    assert _ZYGOTE[2] in sys.modules
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any], standard: Sequence[int]) -> NoReturn:
    """Be the process that is asked for."""
    if request["is_leader"]:
        os.setsid()
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    subprocess.Popen = _Popen  # type: ignore[misc]
    _run(request["words"], request["environment"], standard, ())


def _run(
    words: Sequence[str], environment: dict[str, str], standard: Sequence[int], kept: Iterable[int]
) -> NoReturn:
    """Run `MODULE ARGUMENTS` as the interpreter would, and end with its status."""
    status = 1
    try:
        for number, file in enumerate(standard):
            os.dup2(file, number)
        close_others({0, 1, 2, *kept})
        show_environment(environment)
        if _AGENT in words and not _is_operated(words):
            _Zygote.unborn = _Unborn()
        status = run_as(words)
    finally:
        end_with(status)


def _is_operated(words: Sequence[str]) -> bool:
    """Return whether an agent answers an operator, and starts those of its runs."""
    return "--operator-port" in words and not any(each.startswith(_LINK) for each in words)


class _Unborn:
    """A process that becomes the agent's zygote, forked while the agent has one thread.

    A thread of the agent may hold a lock that a later child would wait for.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._ours.close()
            _wait_for_birth(theirs)
        theirs.close()

    def bear(self, words: Sequence[str], environment: dict[str, str], files: Sequence[int]) -> None:
        """Let it run `MODULE ARGUMENTS`, with these files under these numbers."""
        request = {
            "words": list(words),
            "environment": environment,
            "files": list(files),
            "network": f"/proc/{os.getpid()}/ns/net",
        }
        with self._ours:
            socket.send_fds(self._ours, [json.dumps(request).encode()], files)


def _wait_for_birth(requests: socket.socket) -> NoReturn:
    """Become the zygote that is asked for, or end with an agent that never wants one."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    control = fcntl.fcntl(requests, fcntl.F_DUPFD_CLOEXEC, _FIRST_FILE)
    requests.close()
    close_others({0, 1, 2, control})
    with socket.socket(fileno=control) as moved:
        data, files, _, _ = socket.recv_fds(moved, _REQUEST_BYTES_MAX, _FILES_MAX)
    if not data:
        os._exit(0)
    request = json.loads(data)
    network = Path(request["network"])
    if network.readlink() != Path("/proc/self/ns/net").readlink():
        namespaces.enter(str(network))
    # They came under the lowest free numbers, of which some may be wanted for others.
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST_FILE) for each in files]
    for number, file in zip(request["files"], away, strict=True):
        os.dup2(file, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    _run(request["words"], request["environment"], (nothing,), request["files"])


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """What an agent starts its zygote with: the first one is forked, all others are started.

    One that answers an operator has one thread, and forks the agents of all its runs.
    """

    def __new__(cls, command: Any, *arguments: Any, **options: Any) -> Any:
        if any(str(each).startswith(_LINK) for each in command):
            _Zygote.unborn = _Unborn()
            return _Zygote(command, stdin=subprocess.DEVNULL, env=dict(os.environ), **options)
        if list(command[:3]) == _ZYGOTE and _Zygote.unborn is not None:
            return _Zygote(command, **options)
        return super().__new__(cls)


class _Zygote:
    """What `subprocess.Popen` is to an agent, of a process that was forked."""

    unborn: _Unborn | None = None

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: dict[str, str]
    ) -> None:
        assert stdin == subprocess.DEVNULL
        assert _Zygote.unborn is not None
        unborn, _Zygote.unborn = _Zygote.unborn, None
        self.returncode: int | None = None
        self.pid = unborn.pid
        self._file = os.pidfd_open(self.pid)
        unborn.bear(command[2:], env, pass_fds)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._file], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("zygote", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._file)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    _preload()
    serve(socket.socket(fileno=int(sys.argv[1])), _become)

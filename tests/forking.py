"""What processes have in common that have imported modules already and fork what tests start.

Such a process computes nothing and has one thread, which is what makes its children sound.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.warm import ROOM

Become = Callable[[dict[str, Any], list[int]], NoReturn]
"""Is, in a new process, what a request asks for, with these files."""
_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES_MAX = 1 << 18
_FILES_MAX = 4


def serve(requests: socket.socket, become: Become) -> None:
    """Fork what is asked for, and tell how it ended, until nobody can ask any more."""
    # Ctrl-C ends the tests, and they end this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    requests.send(b"ready")
    ends: dict[int, int] = {}
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == wake:
                    os.read(wake, 4096)
                    _tell_ends(ends)
                elif not _take(requests, ends, become):
                    return


def _take(requests: socket.socket, ends: dict[int, int], become: Become) -> bool:
    data, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, _FILES_MAX)
    if not data:
        return False
    pid = os.fork()
    if not pid:
        _begin()
        become(json.loads(data), files[1:])
    for file in files[1:]:
        os.close(file)
    ends[pid] = files[0]
    requests.send(str(pid).encode())
    return True


def _tell_ends(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = ends.pop(pid)
        try:
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # nobody waits for it
        finally:
            os.close(end)


def _begin() -> None:
    """Be a process as any other, but for its end with the one that has forked it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_as(words: Sequence[str]) -> int:
    """Run `MODULE ARGUMENTS` as the interpreter would; returns the status that it ends with."""
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - the interpreter would print it and end with 1
        traceback.print_exc()
        return 1
    return 0


def end_with(status: int) -> NoReturn:
    """End a forked process: what its parent would do at its end is not for it to do."""
    if sys.exc_info()[0] is not None:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def close_others(kept: Iterable[int]) -> None:
    """Close all files but some."""
    kept = set(kept)
    last = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    for file in range(last + 1):
        if file not in kept:
            try:
                os.close(file)
            except OSError:
                continue


def show_environment(environment: Mapping[str, str]) -> None:
    """Make it this process's environment, also as /proc tells it: tests look there for theirs.

    What /proc shows is the memory that the interpreter was started with. Nothing points there
    any more once each variable has been set anew.
    """
    os.environ.clear()
    os.environ.update(environment)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    block = b"".join(os.fsencode(f"{key}={value}\0") for key, value in environment.items())
    assert len(block) <= end - begin, f"{ROOM} is too short"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, block, len(block))

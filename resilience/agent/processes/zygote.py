"""Forks workers from a process that has imported everything already.

Imports take seconds, a fork milliseconds. What forks must have one thread only
and hold no accelerator context, no process group and no store: a child of such
a process hangs in its first matrix product or its first connection. So this is
a process of its own; it does nothing but wait for requests and for children.

Run by the agent: python -m resilience.agent.processes.zygote FD MODULE...
Zygote and workers are children of the agent and die with it, also where they are
stopped or hold the interpreter's lock. To be the agent's child a worker is forked
by a process that ends at once: the kernel then gives it to the agent, which has
asked for orphans. So workers live on when the zygote is killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from resilience.agent.processes.user_program import become_program, exit_status
from resilience.comm.messages import Open
from resilience.comm.page import Page
from resilience.inprocess.env_rendezvous import serve_env
from resilience.inprocess.handles import AGENT_FD, AGENT_PID, EVENTS_FD, read_handles
from resilience.inprocess.plain import await_rank
from resilience.inprocess.set_up import serve_groups
from resilience.inprocess.variables import LINEAR_ALGEBRA_THREADS, node_variables, rank_variables

_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES_MAX = 1 << 20
_LOWEST = 19
_SAFE_THREADS = {"jemalloc_bg_thd"}
"""The allocator that pyarrow brings, which transformers may import: it is ready for each fork."""
NUM_FILES = 4
"""Descriptors that come with a request: the worker's socket, its stdout, its stderr, its events."""


def main(arguments: Sequence[str]) -> int:
    """Serve requests until the agent closes the socket."""
    die_with_parent(int(os.environ.get(AGENT_PID, "0")))
    # To end everybody in order is the agent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agent = socket.socket(fileno=int(arguments[0]))
    # Else numpy's own library starts threads of its own at import, OMP_NUM_THREADS of them.
    os.environ.setdefault(LINEAR_ALGEBRA_THREADS, "1")
    for name in arguments[1:]:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any module of a user's may fail in any way
            _say(agent, {"problem": f"cannot import {name!r} of --preload: {error!r}"})
            return 1
    if names := _find_threads():
        _say(agent, {"threads": names})
        return 1
    # Of threads that are safe, as seen above.
    warnings.filterwarnings("ignore", message=".* is multi-threaded, use of fork")
    gc.collect()
    gc.freeze()
    _say(agent, {"is_ready": True})
    while _take_request(agent):
        pass
    return 0


def _find_threads() -> list[str]:
    """Return the names of the threads that make a fork unsafe: any may hold a lock."""
    names = set()
    for task in Path("/proc/self/task").iterdir():
        if task.name != str(os.getpid()):
            with suppress(FileNotFoundError):  # it has ended since
                names.add((task / "comm").read_text().strip())
    return sorted(names - _SAFE_THREADS)


def _take_request(agent: socket.socket) -> bool:
    """Have forked what the agent asks for; False where the agent is gone."""
    try:
        data, files, _, _ = socket.recv_fds(agent, _REQUEST_BYTES_MAX, NUM_FILES)
    except ConnectionResetError:  # it has ended with something unread that was said to it
        return False
    if not data:
        return False
    request = json.loads(data)
    begin, told = os.pipe()

    def become() -> NoReturn:
        agent.close()
        os.close(told)
        _become_worker(request, files, begin)

    try:
        pid = _fork_orphan(become)
    except OSError as error:
        _say(agent, {"unforked": request["number"], "text": str(error)})
    else:
        _say(agent, {"forked": request["number"], "pid": pid})
        os.write(told, b"\n")
    for file in (*files, begin, told):
        os.close(file)
    return True


def _fork_orphan(become: Callable[[], NoReturn]) -> int:
    """Return the process that runs `become` and has the agent for its parent, as it has by now."""
    answer, told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        parent = os.fork()
        if parent == 0:
            _fork_and_end(become, answer, told)
        os.waitpid(parent, 0)
        # Nothing comes any more from one that was killed before it could say it.
        word = int(os.read(answer, 32))
    finally:
        os.close(answer)
        os.close(told)
    if word < 0:
        raise OSError(-word, os.strerror(-word))
    return word


def _fork_and_end(become: Callable[[], NoReturn], answer: int, told: int) -> NoReturn:
    """Fork, tell which process that is, and leave it to the agent."""
    try:
        try:
            word = os.fork()
        except OSError as error:
            word = -(error.errno or errno.EAGAIN)
        if word == 0:
            os.close(answer)
            os.close(told)
            become()
        os.write(told, str(word).encode())
    finally:
        # Who asks goes by the word; `become` ends this process itself, or has failed at that.
        os._exit(1)


def _say(agent: socket.socket, message: dict[str, Any]) -> None:
    try:
        agent.send(json.dumps(message).encode())
    except OSError:
        sys.exit(1)


def _become_worker(request: dict[str, Any], files: Sequence[int], begin: int) -> NoReturn:
    """Run the program in this process and end with its status."""
    status = 1
    try:
        if not os.read(begin, 1):
            # The zygote is gone before the agent knew of this process.
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(begin)
        die_with_parent(int(os.environ[AGENT_PID]))
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(files[1], 1)
        os.dup2(files[2], 2)
        os.close(files[1])
        os.close(files[2])
        for file in (files[0], files[3]):
            os.set_inheritable(file, False)  # noqa: FBT003
        os.environ.update(request["environment"])
        os.environ[AGENT_FD] = str(files[0])
        os.environ[EVENTS_FD] = str(files[3])
        _prefer_as_victim()
        if request["is_patient"]:
            os.nice(_LOWEST)
        script = request["script"]
        if request["warm"] == "imports":
            is_alone = script and script["alone"]
            _await_rank(node_variables if is_alone else rank_variables)
            if not is_alone:
                serve_env()
                serve_groups()
        if script:
            become_program(request["command"], script, (files[0], files[3]))
        run_program(request["command"])
        status = 0
    except SystemExit as stop:
        status = exit_status(stop)
    except KeyboardInterrupt:  # the agent was asked to end, and says so itself
        status = 128 + signal.SIGINT
    except BaseException:  # noqa: BLE001 - as the interpreter would end, without its destructors
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        # A program may have closed them, or set them to None.
        with suppress(ValueError, AttributeError):
            stream.flush()
    # Destructors of what a framework holds may wait for threads that wait for them.
    os._exit(status)


def _await_rank(describe: Callable[[Open], dict[str, str]]) -> None:
    """Wait for a rank here, on behalf of a program that reads it from its environment."""
    handles = read_handles(os.environ)
    assert handles
    agent = socket.socket(fileno=os.dup(handles.agent_file))
    page = Page(handles.page_file, handles.num_slots)
    os.environ.update(await_rank(agent, page, handles.slot, describe))
    agent.close()
    page.close()


def run_program(command: Sequence[str]) -> None:
    """Run `-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS` as the interpreter would."""
    sys.argv = list(command[1:]) if command[0] == "-m" else list(command)
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def _prefer_as_victim() -> None:
    """Let the kernel end a worker, which can be replaced, before its agent when memory is short."""
    with suppress(OSError):  # a container may forbid it, and it is a preference
        Path("/proc/self/oom_score_adj").write_text("500")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

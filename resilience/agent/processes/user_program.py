"""A program of a user's in the process of a worker: executed, or run as the interpreter runs it.

Its main module, arguments, paths, exit status and last words are those of `python PROGRAM`: a
class of the main module is found by processes that are spawned, threads are waited for, functions
of atexit are called, and files are flushed.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from resilience.inprocess.variables import LINEAR_ALGEBRA_THREADS, fill_in

_OWN_PATH = sys.path[:1]
"""Where Python looks first on behalf of the process that forks workers."""
_OWN_THREADS = os.environ.get(LINEAR_ALGEBRA_THREADS)
"""What was said before that process has said it for its imports."""


def become_program(command: list[str], script: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Run a command to its end, which is that of this process; `script` is a ProgramConfig.

    `files` stay open in a program that is executed. Raises SystemExit where it cannot be.
    """
    command = fill_in(command, os.environ, is_alone=script["alone"])
    if _OWN_THREADS is None:
        os.environ.pop(LINEAR_ALGEBRA_THREADS, None)
    try:
        os.chdir(script["folder"] or ".")
        if script["executed"]:
            for file in files:
                os.set_inheritable(file, True)  # noqa: FBT003
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)  # else what Python ignores is inherited
            os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"cannot run {command[0]} in {Path.cwd()}: {error}") from error
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()  # else all workers draw as one process that has imported it
    _interpret(command)


def _interpret(command: Sequence[str]) -> NoReturn:
    main = ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    # The second is where processes that are spawned have it, and say that their objects are from.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    # Lines are seen when they are printed, as of a program under PYTHONUNBUFFERED.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run, status = _find_run(command, main), 0
    try:
        run()
    except SystemExit as stop:
        status = exit_status(stop)
    except KeyboardInterrupt:  # the agent was asked to end, and says so itself
        status = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - as the interpreter would end
        status = 1
        found = _without_own(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(found), found)
    ctypes.pythonapi.Py_Exit(status)
    os._exit(status)


def _find_run(command: Sequence[str], main: ModuleType) -> Callable[[], object]:
    """Set arguments and paths for `-m MODULE ...` or `SCRIPT ...`; returns what runs it."""
    as_main = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001
    sys.argv = list(command)
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        _look_first_in(str(Path.cwd()))
        return lambda: as_main(command[1], alter_argv=True)
    path = Path(command[0]).absolute()
    if path.is_dir():
        _look_first_in(str(path))
        return lambda: as_main("__main__", alter_argv=False)
    _look_first_in(str(path.resolve().parent))
    main.__file__, main.__spec__ = str(path), None
    main.__loader__ = SourceFileLoader("__main__", str(path))
    code = partial(compile, filename=str(path), mode="exec", dont_inherit=True)
    return lambda: exec(code(path.read_bytes()), main.__dict__)


def _look_first_in(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path = [folder, *(sys.path[1:] if sys.path[:1] == _OWN_PATH else sys.path)]


def _without_own(found: TracebackType | None) -> TracebackType | None:
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found


def exit_status(stop: SystemExit) -> int:
    """Return the status of a process that ends so; what is no number is printed."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    sys.stderr.write(f"{stop.code}\n")
    return 1

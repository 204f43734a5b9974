"""The command line: `python -m launcher recipe=NAME [key=value ...]`, or the script `launcher`.

Exit status: 0 done, 1 something outside refused or failed, 2 the recipe or the
command line is wrong (one message, nothing written).
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.commands.command_line import ordered_arguments, override_secrets
from launcher.commands.usage import COMMANDS, USAGE
from launcher.composition.choice import choose_recipe
from launcher.errors import LauncherError, OutsideError, RecipeError, system_failure
from launcher.paths import find_folders, shipped_folder
from launcher.terminal import printing

if TYPE_CHECKING:
    from omegaconf import DictConfig

FIRST_SIGNAL_STATUS = 128
_HELP = ("-h", "--help")
_COMPLETION = ("--shell-completion", "-sc")
# Options, and overrides of what Hydra itself goes by.
_HYDRAS = re.compile(r"-|[+~]*hydra\b")
# These print something of Hydra's own and choose no recipe.
_WITHOUT_RECIPE = ("--hydra-help", "--version", *_COMPLETION)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    # The person is still typing, and the shell would print a message into the line.
    is_quiet = any(option in given for option in _COMPLETION)
    # Where a caller has closed it there is none; Hydra logs to it, too.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115  the process's own
    # A description may hold what a terminal's encoding does not.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    errors = io.StringIO() if is_quiet or sys.stderr is None else printing(sys.stderr)
    with contextlib.redirect_stdout(printing(sys.stdout)), contextlib.redirect_stderr(errors):
        return _run(given)


def _run(given: list[str]) -> int:
    logging.raiseExceptions = False
    try:
        status = _answer(given)
        sys.stdout.flush()
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can be told.
        _silence()
        return 1
    except KeyboardInterrupt:
        return FIRST_SIGNAL_STATUS + signal.SIGINT
    except OSError as error:
        # A folder, file or disk that fails anywhere on the way.
        sys.stderr.write(f"{system_failure(error)}\n")
        _silence()
        return 1
    return status


def _silence() -> None:
    """Drop what is still to be printed, which the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(given: list[str]) -> int:
    if not given or given[0] == "help" or any(word in _HELP for word in given):
        sys.stdout.write(_help_text(given))
        return 0 if given else 2
    # Before anything shows or writes a part of the command line.
    if problems := override_secrets(given):
        raise RecipeError("\n".join(problems))
    try:
        start = Path.cwd()
    except FileNotFoundError as error:
        raise OutsideError("the current folder is gone; change to one that is there") from error
    if given[0] in COMMANDS:
        from launcher.commands import run_command

        return run_command(given[0], given[1:], start)
    # What is made until the job is written is kept or goes with the process: a twelfth is saved.
    gc.disable()
    try:
        return _launch(given, start)
    finally:
        gc.enable()


def _help_text(given: list[str]) -> str:
    """Return the help of a command that is named first, or after `help`; else the launcher's."""
    words = given[1:] if given[:1] == ["help"] else given
    return COMMANDS.get(words[0], USAGE) if words else USAGE


def _launch(given: list[str], start: Path) -> int:
    folders = find_folders(start)
    arguments = ordered_arguments(given, folders.recipes)
    choice = choose_recipe(arguments, folders.recipes, start)
    if choice.recipe is None and not any(option in given for option in _WITHOUT_RECIPE):
        raise RecipeError("no recipe; name one with recipe=NAME, `list` shows them")
    notes = (f"note: recipe {old!r} is called {new!r} now\n" for old, new in choice.renamed)
    sys.stderr.writelines(notes)
    # Hydra is imported once the recipe is known to be there.
    from launcher.app import launch
    from launcher.composition.compose import call_once, check_kept
    from launcher.composition.hydra_errors import composing_error, refused_search_path
    from launcher.composition.search import Loaded, add_search_path
    from launcher.sweep import SweepFolder

    check_kept(choice, start)
    recipes = (*choice.folders, *folders.recipes)
    add_search_path(folders.conf, recipes, choice.frozen)
    statuses = [0]
    refusals: list[LauncherError] = []
    is_composing = True

    def run(config: DictConfig) -> None:
        nonlocal is_composing
        is_composing = False
        # Hydra would print the whole command line beside an error raised here, secrets and all.
        try:
            # A person who stopped one job of a sweep does not want the next.
            if not refusals and max(statuses) < FIRST_SIGNAL_STATUS:
                statuses.append(launch(config, loaded, folders, start, choice))
        except LauncherError as error:
            refusals.append(error)
        except OSError as error:
            refusals.append(system_failure(error))
        is_composing = True
        # What the next job of a sweep is composed of is its own.
        loaded.clear()

    is_trace_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Makes Hydra raise its errors instead of printing them and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    is_for_hydra = any(_HYDRAS.match(word) for word in choice.arguments)
    try:
        with refused_search_path(), Loaded.record() as loaded:
            if is_for_hydra or not call_once(choice.arguments, loaded, run):
                loaded.clear()
                _run_hydra(choice.arguments, run)
    except Exception as error:
        if is_trace_wanted or not is_composing:
            raise
        raise composing_error(error, recipes, choice.recipe) from error
    finally:
        if len(statuses) == 1:
            SweepFolder.remove_new()
    if refusals:
        raise refusals[0]
    if SweepFolder.path and len(statuses) == 1:
        raise RecipeError("the sweep has no job: one of its keys has no value to take")
    return max(statuses)


def _run_hydra(arguments: Sequence[str], run: Callable[[DictConfig], None]) -> None:
    """Let Hydra's own entry compose: it knows sweeps, and options that show what was composed."""
    import hydra

    from launcher.composition.compose import CONFIG_NAME, VERSION_BASE

    conf = str(shipped_folder() / "conf")
    sys.argv = ["launcher", *arguments]
    hydra.main(config_path=conf, config_name=CONFIG_NAME, version_base=VERSION_BASE)(run)()


if __name__ == "__main__":
    sys.exit(main())

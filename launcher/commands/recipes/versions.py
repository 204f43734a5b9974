"""The commands `check`, `freeze` and `history`: versions of recipes."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.composition.choice import nearest
from launcher.errors import RecipeError
from launcher.paths import find_folders, shipped_folder
from launcher.terminal import drawing

if TYPE_CHECKING:  # the other commands here do without
    from launcher.versions.checking import Checker


def print_check(arguments: Sequence[str], start: Path) -> int:
    """Say which recipes are not what their version says; with --update keep them as they are.

    Returns 1 where something is wrong and was not mended. Raises RecipeError and OutsideError.
    """
    from launcher.holding import held_folder
    from launcher.versions.checking import Checker

    names, why = _parse_check(arguments)
    folders = find_folders(start).recipes
    # What is shipped is as it was: a team asks for its own, and changes nothing else.
    team = [folder for folder in folders if folder != shipped_folder() / "recipes"]
    own = team or list(folders)
    checkers = [Checker(folder, start) for folder in (folders if names else own)]
    known = [name for each in checkers for name in each.names()]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"no recipe {unknown[0]!r}; {nearest(unknown[0], known)}")
    with ExitStack() as stack:
        for folder in own if why is not None else ():
            stack.enter_context(held_folder(folder))
        num_wrong = sum(
            _check_folder(each, names, why if each.folder in own else None) for each in checkers
        )
    if not num_wrong:
        number = len(names or known)
        sys.stdout.write(f"{number} recipe{'s' * (number != 1)} as their versions say\n")
    return 1 if num_wrong else 0


def _check_folder(checker: Checker, names: Sequence[str], why: str | None) -> int:
    """Tell what is wrong in a folder and is not mended; returns how many things."""
    found = []
    for name in checker.names():
        for finding in checker.check(name) if not names or name in names else ():
            if why is None or not finding.is_mended_by_update:
                found.append(finding)
                continue
            today = datetime.datetime.now(datetime.timezone.utc).date()
            try:
                done = checker.update(name, why, today)
            except RecipeError as error:
                found.append(replace(finding, lines=(str(error),)))
            else:
                sys.stdout.write(f"{name} {done}\n")
    found += checker.check_folder() if not names else ()
    for each in found:
        rest = "".join(f"\n  {line}" for line in each.lines[1:])
        sys.stderr.write(f"{each.subject}: {each.lines[0]}{rest}\n")
    return len(found)


def _parse_check(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the recipes to check, and why they are updated; None where they are not."""
    words = list(arguments)
    is_update = "--update" in words
    if is_update:
        words.remove("--update")
    why = None
    if "-m" in words:
        at = words.index("-m")
        why = words[at + 1].strip() if at + 1 < len(words) else ""
        del words[at : at + 2]
    if is_update != (why is not None) or why == "" or (why and len(why.splitlines()) > 1):
        raise RecipeError("check takes --update and -m 'WHY' together, WHY in one line")
    if wrong := next((word for word in words if word.startswith("-")), None):
        raise RecipeError(f"check takes recipes' names, --update and -m 'WHY', not {wrong!r}")
    return words, why


def print_history(arguments: Sequence[str], start: Path) -> int:
    """Print a line for each version of a recipe. Raises RecipeError."""
    from launcher.versions.folder import read_lock

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise RecipeError("history takes a recipe's name; `list` shows them")
    (name,) = arguments
    locks = [read_lock(folder) for folder in find_folders(start).recipes]
    # A team's recipe of a shipped one's name goes on with its numbers.
    versions = {each.version: each for lock in reversed(locks) for each in lock.get(name, ())}
    if not versions:
        known = sorted({each for lock in locks for each in lock})
        raise RecipeError(f"no versions of {name!r} are kept; {nearest(name, known)}")
    for _, each in sorted(versions.items()):
        sys.stdout.write(f"{name}@{each.version}  {each.date}  {each.digest[:12]}  {each.change}\n")
    return 0


def print_frozen(arguments: Sequence[str], start: Path) -> int:
    """Print a recipe with its overrides as one file. Raises RecipeError."""
    from launcher.composition.frozen import frozen_text
    from launcher.versions.resolved import resolve_recipe

    chosen = [word for word in arguments if word.startswith("recipe=")]
    if len(chosen) != 1 or any(word.startswith("-") for word in arguments):
        raise RecipeError("freeze takes recipe=NAME and overrides, and no option")
    overrides = [word for word in arguments if word not in chosen]
    resolved = resolve_recipe(chosen[0].removeprefix("recipe="), overrides, start)
    drawing(sys.stdout).write(frozen_text(resolved.frozen))
    return 0

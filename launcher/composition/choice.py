"""Find the recipe that the command line names, before Hydra composes anything.

Hydra answers a mistyped nested name with its search path alone, so the name is
looked up here first. A recipe given by path becomes a name in a folder of its own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.composition.aliases import find_renamed
from launcher.errors import RecipeError
from launcher.written.overrides import keep_text

if TYPE_CHECKING:  # most command lines name a live recipe, and do without
    from launcher.composition.frozen import Frozen

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Choice:
    """The command line with every recipe path turned into a name, and those folders."""

    arguments: tuple[str, ...]
    folders: tuple[Path, ...]
    recipe: str | None
    """The name that was asked for; None where the command line names none."""
    by_path: frozenset[str] = frozenset()
    """Names that were given as a file's path, and that of a frozen recipe."""
    frozen: Frozen | None = None
    """What the recipe is composed of, where it was chosen by its version or from a frozen file."""
    locked: str | None = None
    """The digest that the lock has of the frozen recipe, where it was chosen by its version."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Recipes that were asked for by an old name, with the new one."""


def list_recipes(folders: Iterable[Path]) -> list[str]:
    """Return the names of all recipes in the folders, sorted; `_` or a dot hides a part."""
    names = {
        path.relative_to(folder).with_suffix("").as_posix()
        for folder in folders
        for path in folder.rglob("*.yaml")
        if not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
    }
    return sorted(names)


def choose_recipe(arguments: Sequence[str], folders: Sequence[Path], start: Path) -> Choice:
    """Check `recipe=` on a command line that is run in the folder `start`.

    Raises RecipeError that offers the nearest names. Several names with commas,
    as `--multirun` takes them, are checked one by one; Hydra's other sweeps are
    left to Hydra.
    """
    arguments = [keep_text(argument) for argument in arguments]
    extra: list[Path] = []
    by_path: set[str] = set()
    renamed: list[tuple[str, str]] = []
    rewritten = list(arguments)
    recipe = None
    for index, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key.lstrip("+") != "recipe" or not equals:
            continue
        if key != "recipe":
            raise RecipeError(f"{argument!r}: a recipe is chosen without +, as recipe={value}")
        if recipe is not None:
            raise RecipeError(
                f"recipe= is given twice, as {recipe!r} and {value!r}; give one (a sweep takes "
                "several: -m recipe=A,B)"
            )
        recipe = value
        if not value:
            raise RecipeError("recipe= names none; `list` shows them")
        if re.match(r"\w+\(", value):
            continue
        parts = [part.strip("'\" ") for part in value.split(",")]
        if found := next((p for part in parts if (p := _frozen(part, folders, start))), None):
            if len(parts) > 1:
                raise RecipeError(
                    f"recipe={value}: a sweep takes live recipes; choose a version alone"
                )
            return _choose_frozen(*found, arguments, index, value)
        names = [_name(part, folders, start, extra) for part in parts]
        for part, name in zip(parts, names, strict=True):
            if part.endswith(_SUFFIXES):
                by_path.add(name)
            elif part != name:
                renamed.append((part, name))
        rewritten[index] = f"recipe={','.join(names)}"
        recipe = names[0]
    chosen = tuple(rewritten), tuple(dict.fromkeys(extra)), recipe, frozenset(by_path)
    return Choice(*chosen, renamed=tuple(renamed))


def _choose_frozen(
    path: Path, locked: str | None, arguments: Sequence[str], index: int, value: str
) -> Choice:
    """Put what the recipe was frozen with before what is given on the command line."""
    from launcher.composition.frozen import ROOT, frozen_arguments, read_frozen

    frozen = read_frozen(path)
    if any(each.startswith("recipe=") for each in arguments[index + 1 :]):
        raise RecipeError(f"recipe= is given twice, one of them as {value!r}; give one")
    given = [*arguments[:index], *arguments[index + 1 :]]
    before = frozen_arguments(frozen, given)
    first = next((i for i, word in enumerate(arguments) if _is_override(word)), index)
    rewritten = (*given[:first], f"recipe={ROOT}", *before, *given[first:])
    return Choice(rewritten, (), value, frozenset({ROOT}), frozen, locked)


def _is_override(word: str) -> bool:
    return word.startswith("~") or (not word.startswith("-") and "=" in word)


def _frozen(value: str, folders: Sequence[Path], start: Path) -> tuple[Path, str | None] | None:
    """Return the file of a frozen recipe and its digest by the lock, None for a live one.

    Raises RecipeError that names the versions that there are.
    """
    name, at, number = value.partition("@")
    if not at and not value.endswith(_SUFFIXES):
        return None
    from launcher.composition.frozen import frozen_path, is_frozen
    from launcher.versions.folder import find_unfit, kept_versions, read_lock
    from launcher.versions.lock import LOCK_FILE, find_version

    if value.endswith(_SUFFIXES):
        path = (start / value).resolve()
        return (path, None) if is_frozen(path) else None
    versions = kept_versions(name, folders) if _NAME.fullmatch(name) else {}
    if number not in map(str, versions) and (new := find_renamed(name, folders)):
        # What it was before it was renamed is kept under its old name.
        name, versions = new, kept_versions(new, folders)
    if not versions:
        known = list_recipes(folders)
        hint = "it has no version that was kept" if name in known else nearest(name, known)
        raise RecipeError(f"no recipe {value!r}; {hint}")
    if not re.fullmatch(r"[1-9]\d*", number) or int(number) not in versions:
        shown = ", ".join(map(str, sorted(versions)))
        raise RecipeError(f"no version {number!r} of recipe {name!r}; allowed: {shown}")
    folder = versions[int(number)]
    version = find_version(read_lock(folder).get(name, ()), int(number))
    problem = find_unfit(folder, name, version) if version else f"{LOCK_FILE} does not name it"
    if problem or version is None:
        raise RecipeError(f"recipe {value!r} cannot be used: {problem}")
    return frozen_path(folder, name, int(number)), version.digest


def _name(value: str, folders: Sequence[Path], start: Path, extra: list[Path]) -> str:
    """Return the name for a recipe's name or path; a path's folder is added to `extra`."""
    if value.endswith(_SUFFIXES):
        path = (start / value).resolve()
        if path.suffix != ".yaml" or not path.is_file():
            name = value.rpartition(".")[0]
            is_known = name in list_recipes(folders)
            hint = f"; the recipe of this name is recipe={name}" if is_known else ""
            raise RecipeError(f"no recipe file {value!r}; allowed: the path of a .yaml file{hint}")
        for folder in folders:
            if path.is_relative_to(folder.resolve()):
                return path.relative_to(folder.resolve()).with_suffix("").as_posix()
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", path.stem):
            raise RecipeError(
                f"recipe file {value!r}: its name has to be of A-Z, a-z, 0-9, _, . and -; rename it"
            )
        extra.append(path.parent)
        return path.stem
    known = list_recipes(folders)
    if not _NAME.fullmatch(value):
        raise RecipeError(
            f"recipe {value!r} is outside the folders of recipes; allowed: a name such as "
            f"{known[0]!r}, or the path of a file that ends in .yaml"
        )
    if not any((folder / f"{value}.yaml").is_file() for folder in folders):
        if new := find_renamed(value, folders):
            return new
        raise RecipeError(f"no recipe {value!r}; {nearest(value, known)}")
    if not value.isascii():
        raise RecipeError(
            f"recipe {value!r}: a recipe's name has a-z, 0-9, _ and / alone; rename its file or "
            "folder, and set recipe.name to the new name"
        )
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """Say which known words are closest to one that is unknown, or name them all."""
    options = sorted(known)
    if close := difflib.get_close_matches(word, options, n=3, cutoff=0.6):
        return f"closest: {', '.join(repr(name) for name in close)}"
    return f"allowed: {', '.join(options) or 'none'}"

"""The versions that a folder of recipes keeps: frozen files, and the lock that names them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.composition.frozen import (
    VERSIONS_FOLDER,
    Frozen,
    frozen_path,
    frozen_text,
    frozen_versions,
    read_frozen,
    read_sum,
)
from launcher.errors import RecipeError
from launcher.versions.lock import LOCK_FILE, Lock, Version, format_lock, parse_lock
from resilience.plain_files import read_plain_text
from resilience.whole_files import replace_text


def read_lock(folder: Path) -> dict[str, tuple[Version, ...]]:
    """Return the lock of a folder of recipes, empty where there is none. Raises RecipeError."""
    path = folder / LOCK_FILE
    try:
        text = read_plain_text(path)
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no UTF-8 text: {error}") from error
    return parse_lock(text, path)


def write_lock(folder: Path, lock: Lock) -> None:
    """Replace the lock of a folder of recipes."""
    replace_text(folder / LOCK_FILE, format_lock(lock), str(os.getpid()))


def write_frozen(folder: Path, frozen: Frozen) -> None:
    """Write or replace the file of a version."""
    path = frozen_path(folder, frozen.name, frozen.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, frozen_text(frozen), str(os.getpid()))


def find_unfit(folder: Path, name: str, version: Version) -> str | None:
    """Return why a version's file does not say to be what the lock names, None where it does."""
    path = frozen_path(folder, name, version.version)
    if not path.is_file():
        return f"{path} is not there, and {LOCK_FILE} names it; get it back from your repository"
    try:
        frozen = read_frozen(path)
    except RecipeError as error:
        return str(error)
    if (frozen.name, frozen.version) != (name, version.version):
        return f"{path} is that of {frozen.name}@{frozen.version}"
    if frozen.digest != version.digest:
        return (
            f"{path} has the digest {frozen.digest[:12]}, and {LOCK_FILE} names "
            f"{version.digest[:12]}"
        )
    if frozen.written_sum and not version.fits(frozen):
        return (
            f"{path} has the content {frozen.written_sum[:12]}, and {LOCK_FILE} names "
            f"{version.content[:12]}; get the file back from your repository"
        )
    if not frozen.written_sum:
        return f"{path} was changed since it was frozen"
    return None


def kept_versions(name: str, folders: Iterable[Path]) -> dict[int, Path]:
    """Return the versions of a recipe that folders keep, each with the first folder that does.

    What a lock names is kept, though its file be lost. Raises RecipeError.
    """
    found: dict[int, Path] = {}
    for folder in folders:
        named = [each.version for each in read_lock(folder).get(name, ())]
        for number in (*named, *frozen_versions(name, [folder])):
            found.setdefault(number, folder)
    return found


def find_kept_sum(name: str, version: int, folders: Iterable[Path]) -> str | None:
    """Return the sum of what is kept of a version of a recipe, None where nothing is."""
    sums = (read_sum(frozen_path(folder, name, version)) for folder in folders)
    return next((each for each in sums if each), None)


def find_unnamed(folder: Path, lock: Lock) -> Iterator[Path]:
    """Yield frozen files that the lock does not name."""
    named = {
        frozen_path(folder, name, each.version) for name, rows in lock.items() for each in rows
    }
    below = folder / VERSIONS_FOLDER
    yield from sorted(set(below.rglob("*.yaml")) - named)

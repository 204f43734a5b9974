"""Find the folders that recipes, groups and templates are read from.

Shipped files lie beside the packages in a checkout and inside the launcher
package in a wheel. A team's own lie in the folder the launcher is started in,
or in any folder above it up to the root of the team's repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder() -> Path:
    """Return the folder that holds our conf/, recipes/ and templates/."""
    packed = _PACKAGE / "_data"
    return packed if packed.is_dir() else _PACKAGE.parent


@dataclass(frozen=True, slots=True)
class Folders:
    """Where to look, in order; the first that has a name wins."""

    conf: tuple[Path, ...]
    recipes: tuple[Path, ...]
    templates: tuple[Path, ...]


def find_folders(start: Path) -> Folders:
    """Return the team's folders seen from `start`, and ours behind them."""
    roots = [*_team_roots(start.resolve()), shipped_folder()]
    unique = list(dict.fromkeys(roots))
    conf, recipes, templates = (
        tuple(root / name for root in unique if (root / name).is_dir())
        for name in ("conf", "recipes", "templates")
    )
    return Folders(conf, recipes, templates)


def readable_path(path: Path, start: Path) -> str:
    """Return a file's path as a person in the folder `start` finds it; ours begins with conf/."""
    for folder in (shipped_folder(), start.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)


def lies_below(folder: str, start: Path) -> bool:
    """Return whether a folder's path leads below `start`, links followed."""
    here = os.path.realpath(start)
    return os.path.realpath(start / folder).startswith(f"{here.rstrip('/')}/")


def _team_roots(start: Path) -> list[Path]:
    """Return `start` and its parents up to a repository's root; alone where there is none."""
    climbed = []
    for folder in (start, *start.parents):
        climbed.append(folder)
        if (folder / ".git").exists():
            return climbed
    return [start]

"""Whether each recipe of a folder is what its version says, and how that is put right."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher import SCHEMA_VERSION
from launcher.composition.aliases import check_aliases
from launcher.composition.choice import list_recipes
from launcher.composition.compose import find_changed
from launcher.composition.frozen import Frozen, frozen_path, frozen_versions, read_frozen, read_sum
from launcher.composition.recipe_file import find_recipe
from launcher.errors import RecipeError
from launcher.paths import find_folders
from launcher.versions.digest import changed_keys
from launcher.versions.folder import (
    find_unfit,
    find_unnamed,
    kept_versions,
    read_lock,
    write_frozen,
    write_lock,
)
from launcher.versions.lock import LOCK_FILE, Version, find_version, with_version
from launcher.versions.resolved import Resolved, raised_text, resolve_recipe, with_number
from resilience.whole_files import replace_text

_UNNAMED = f"{LOCK_FILE} does not name it; get the lock back from your repository"
_RAISE = "`check --update -m WHY` raises its version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong with a recipe, or with the folder that keeps its versions."""

    subject: str
    lines: tuple[str, ...]
    is_mended_by_update: bool = False


def find_changed_keys(recipe: str, version: int, start: Path) -> list[str]:
    """Return a line for each key of a recipe that its kept version has with another value.

    The same values from other files are no change. Raises RecipeError.
    """
    now, before = (resolve_recipe(each, start=start) for each in (recipe, f"{recipe}@{version}"))
    return list(changed_keys(before.written_values(), now.written_values()))


class Checker:
    """Checks the recipes of one folder that is seen from the folder `start`."""

    def __init__(self, folder: Path, start: Path) -> None:
        self.folder, self._start = folder, start
        self._folders = find_folders(start).recipes
        self.lock = read_lock(folder)

    def names(self) -> list[str]:
        """Return the folder's recipes, without those that another folder has before it."""
        own = list_recipes([self.folder])
        return [n for n in own if find_recipe(n, self._folders) == self.folder / f"{n}.yaml"]

    def check(self, name: str) -> Iterator[Finding]:
        """Yield what is wrong with a recipe and its versions."""
        unfit = list(self._unfit(name))
        try:
            # By name: a recipe whose name is not its path is broken.
            now = resolve_recipe(name, start=self._start)
        except RecipeError as error:
            yield Finding(subject=name, lines=tuple(str(error).splitlines()))
            return
        if unfit:
            # What is lost of the version that the recipe still is can be written again.
            is_mended = [version.fits(now.frozen) for version, _ in unfit] == [True]
            lines = tuple(problem for _, problem in unfit)
            yield Finding(subject=name, lines=lines, is_mended_by_update=is_mended)
            return
        if now.frozen.name != name:
            text = f"recipe.name is {now.frozen.name!r}; allowed: {name!r}"
            yield Finding(subject=name, lines=(text,))
            return
        if lines := tuple(self._compare(name, now)):
            yield Finding(subject=name, lines=lines, is_mended_by_update=True)

    def _unfit(self, name: str) -> Iterator[tuple[Version, str]]:
        """Yield each version of a name whose file is not what the lock says, and why."""
        for version in self.lock.get(name, ()):
            problem = find_unfit(self.folder, name, version)
            if problem is None:
                frozen = read_frozen(frozen_path(self.folder, name, version.version))
                problem = find_changed(frozen, version.digest, self._start)
            if problem:
                yield version, problem

    def _compare(self, name: str, now: Resolved) -> Iterator[str]:
        versions, number = self.lock.get(name, ()), now.frozen.version
        known = find_version(versions, number)
        if known is None:
            last = f", whose newest is {versions[-1].version}" if versions else ""
            new = self._next_number(name, now)
            if not versions and new > number:
                last = f", and {name}@{new - 1} is the recipe whose place it takes"
            how = f"`check --update -m WHY` adds {new}"
            lost = self._find_lost(with_number(now, new).frozen)
            yield lost or f"version {number} is not in {LOCK_FILE}{last}; {how}"
        elif (changed := self._changed_keys(now)) or known.digest != now.frozen.digest:
            yield f"is not what version {number} was; {_RAISE}"
            yield from changed
        elif number != versions[-1].version:
            yield f"is version {number}, and {LOCK_FILE} has {versions[-1].version}; {_RAISE}"

    def _changed_keys(self, now: Resolved) -> list[str]:
        name, number = now.frozen.name, now.frozen.version
        if read_sum(frozen_path(self.folder, name, number)) == now.frozen.content_sum():
            return []
        return find_changed_keys(name, number, self._start)

    def _next_number(self, name: str, now: Resolved) -> int:
        """Return the number of a version that is added now: none that the name has had.

        Those of a recipe of another folder, whose place this one takes, are among them.
        """
        behind = self._folders[self._folders.index(self.folder) + 1 :]
        named = [each.version for each in self.lock.get(name, ())]
        return max([now.frozen.version - 1, *named, *kept_versions(name, behind)]) + 1

    def _find_lost(self, new: Frozen) -> str | None:
        """Return what a lock that is lost, or of an older day, does not name; None for nothing.

        An update that was killed has left the file of the version that is new now.
        """
        numbers = frozen_versions(new.name, [self.folder])
        own = [frozen_path(self.folder, new.name, number) for number in numbers]
        for path in find_unnamed(self.folder, self.lock):
            is_left = read_sum(path) == new.content_sum()
            if not self.lock or (path in own and not is_left):
                return f"{path}: {_UNNAMED}, or remove the file"
        return None

    def check_folder(self) -> Iterator[Finding]:
        """Yield what is kept and belongs to no recipe of the lock, and old names of no recipe."""
        for name, problem in check_aliases(self.folder, self._folders):
            yield Finding(subject=name, lines=(problem,))
        for path in find_unnamed(self.folder, self.lock):
            yield Finding(subject=str(path), lines=(f"{_UNNAMED}, or remove the file",))
        # Recipes that are gone or have another name by now, whose versions can still be run.
        for name in sorted({*self.lock} - {*self.names()}):
            if lines := tuple(problem for _, problem in self._unfit(name)):
                yield Finding(subject=name, lines=lines)

    def update(self, name: str, why: str, today: datetime.date) -> str:
        """Keep a recipe as it is now under a version of its own; returns in words what was done.

        The lock comes last: killed at any moment, it names nothing that is not there.
        """
        self.lock = read_lock(self.folder)
        now = resolve_recipe(name, start=self._start)
        versions = self.lock.get(name, ())
        known = find_version(versions, now.frozen.version)
        is_same = known and known == versions[-1] and known.fits(now.frozen)
        if known and is_same and any(self._unfit(name)):
            write_frozen(self.folder, now.frozen)
            return f"has the file of version {known.version} again"
        number = self._next_number(name, now)
        kept = with_number(now, number).frozen
        if lost := self._find_lost(kept):
            raise RecipeError(lost)
        path = self.folder / f"{name}.yaml"
        # Before anything is written: not every file can be given another number.
        text = raised_text(path, number) if number != now.frozen.version else None
        write_frozen(self.folder, kept)
        if text is not None:
            replace_text(path, text, str(os.getpid()))
        version = Version(
            version=number,
            digest=kept.digest,
            content=kept.content_sum(),
            schema=SCHEMA_VERSION,
            date=today,
            change=why,
        )
        self.lock = with_version(self.lock, name, version)
        write_lock(self.folder, self.lock)
        return f"is version {number} now"

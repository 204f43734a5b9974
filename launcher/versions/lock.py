"""The lock of a folder of recipes: a line for each version of each recipe. Pure.

Recipes and their versions are in order, so that two branches that have both raised one recipe's
version add a line at the same place, and meet in a merge.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from launcher.composition.frozen import Frozen
from launcher.errors import RecipeError
from launcher.written.scalars import find_scalars

LOCK_FILE = "recipes.lock"
_HEAD = "# What each version of each recipe resolves to; `launcher check --update` writes it.\n"
_FORMS = {
    "version": r"[1-9]\d*",
    "schema": r"[1-9]\d*",
    "digest": r"[0-9a-f]{64}",
    "change": r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*",
    "content": r"([0-9a-f]{64})?",
}
_DEPTH_MAX = 3
_CONFLICT = re.compile(r"^(<{7}|={7}|>{7})", re.MULTILINE)
# What both sides of a conflict have; git may show what was before between them.
_SIDES = re.compile(
    r"^<{7}.*\n((?:.*\n)*?)(?:\|{7}.*\n(?:.*\n)*?)?={7}.*\n((?:.*\n)*?)>{7}.*\n", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a recipe."""

    version: int
    digest: str
    content: str = ""
    """The sum of the kept file's content; empty in a line of a launcher that did not keep it."""
    schema: int
    date: datetime.date
    change: str
    """One line that tells people what is other than before."""

    def fits(self, frozen: Frozen) -> bool:
        """Return whether this is the version of a recipe that would be kept so."""
        return self.digest == frozen.digest and self.content in ("", frozen.content_sum())


Lock = Mapping[str, tuple[Version, ...]]
"""By recipe's name: its versions, the oldest first."""


def parse_lock(text: str, path: object) -> dict[str, tuple[Version, ...]]:
    """Return what a lock says. Raises RecipeError that names its file and what is wrong."""
    if _CONFLICT.search(text):
        raise RecipeError(f"{path} holds a merge that is not ended: {_way_out(text, path)}")
    try:
        _check_shape(text, path)
        list(find_scalars(text))
        content = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        is_of_value = isinstance(error, (ConstructorError, ValueError))
        problem = f": {getattr(error, 'problem', error)}" if is_of_value else ""
        raise RecipeError(f"{path}{line}: broken YAML{problem}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: allowed: a mapping of recipes' names to their versions")
    return {str(name): _read_versions(str(name), rows, path) for name, rows in content.items()}


def _check_shape(text: str, path: object) -> None:
    """Refuse what no lock has, and what could grow without bounds where it is read."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _DEPTH_MAX:
            line = getattr(event.start_mark, "line", 0) + 1
            raise RecipeError(f"{path}, line {line}: allowed: rows of versions, without aliases")


def _way_out(text: str, path: object) -> str:
    """Return what ends a merge in which both branches have added lines at one place."""
    sides = [_SIDES.sub(side, text) for side in (r"\1", r"\2")]
    try:
        is_whole = not any(map(_CONFLICT.search, sides))
        ours, theirs = (parse_lock(side, path) if is_whole else {} for side in sides)
    except RecipeError:
        ours = theirs = {}
    twice = [
        f"{name} has two versions {each.version}"
        for name, rows in ours.items()
        for each in rows
        if find_version(theirs.get(name, ()), each.version) not in (None, each)
    ]
    if ours and not twice:
        return "its branches have lines of other recipes or versions; keep those of both"
    return (
        f"{'; '.join(twice) or 'two branches have given a recipe the same version'}; keep one "
        "branch's line, raise recipe.version in the other's recipe by one, and run `launcher "
        "check --update -m WHY`; lines of other recipes are kept from both"
    )


def _read_versions(name: str, rows: object, path: object) -> tuple[Version, ...]:
    found = [_read_version(name, row, path) for row in (rows if isinstance(rows, list) else [rows])]
    numbers = [each.version for each in found]
    if numbers != sorted(set(numbers)):
        raise RecipeError(f"{path}: {name}: versions {numbers}; allowed: each once, in order")
    return tuple(found)


def _read_version(name: str, row: object, path: object) -> Version:
    fields = ("version", "digest", "schema", "date", "change")
    if not isinstance(row, dict) or {*row, "content"} != {*fields, "content"}:
        raise RecipeError(f"{path}: {name}: {row!r}: allowed: a mapping of {', '.join(fields)}")
    for key, form in _FORMS.items():
        if not re.fullmatch(form, str(row.get(key, ""))):
            raise RecipeError(f"{path}: {name}: {key} {row[key]!r}: allowed: {form}")
    try:
        date = datetime.date.fromisoformat(str(row["date"]))
    except ValueError as error:
        raise RecipeError(f"{path}: {name}: date {row['date']!r}: allowed: YYYY-MM-DD") from error
    return Version(
        version=int(row["version"]),
        digest=str(row["digest"]),
        content=str(row.get("content", "")),
        schema=int(row["schema"]),
        date=date,
        change=str(row["change"]),
    )


def format_lock(lock: Lock) -> str:
    """Return the text of a lock."""
    lines = [_HEAD]
    for name in sorted(lock):
        lines.append(f"{name}:\n")
        lines += [f"- {_format_row(each)}\n" for each in lock[name]]
    return "".join(lines)


def _format_row(each: Version) -> str:
    row: dict[str, Any] = {
        "version": each.version,
        "digest": each.digest,
        **({"content": each.content} if each.content else {}),
        "schema": each.schema,
        "date": each.date.isoformat(),
        "change": each.change,
    }
    text: str = yaml.safe_dump(
        row, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True
    )
    return text.strip()


def find_version(versions: Iterable[Version], number: int) -> Version | None:
    """Return the version with a number, None where there is none."""
    return next((each for each in versions if each.version == number), None)


def with_version(lock: Lock, name: str, new: Version) -> dict[str, tuple[Version, ...]]:
    """Return the lock with one more version of a recipe, or with another one of that number."""
    kept = [each for each in lock.get(name, ()) if each.version != new.version]
    versions = tuple(sorted([*kept, new], key=lambda each: each.version))
    return {**lock, name: versions}

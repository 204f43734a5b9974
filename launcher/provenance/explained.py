"""What is told of each key: its value, who has set it, what that replaced. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.composition.references import referred_places
from launcher.job import environment
from launcher.job.environment import Variable
from launcher.job.fields import shown
from launcher.provenance.fold import MISSING, SECTION, Fold, Origin, Setting
from launcher.provenance.place import Place, is_same, key_of, leaves
from launcher.secrets import NOT_SHOWN, masked

UNKNOWN = "unknown"
THE_LAUNCHER = Origin(file="the launcher", path=environment.__file__)
"""Who has set a variable of the workers that no file and no override sets."""
_REFERENCE = "${"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A value that somebody has set, as it may be shown."""

    key: str
    value: object
    origin: Origin | None
    """None where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One key of a config, and where its value comes from."""

    key: str
    value: object
    """With its references followed, and without secrets."""
    written: object
    """As its origin has written it."""
    origin: Origin | None
    """None where the layers do not lead to the value that Hydra composed."""
    replaced: tuple[Told, ...]
    """From the newest to the first."""
    refers_to: tuple[Told, ...]


class Explainer:
    """Tells of the keys of one config."""

    def __init__(self, written: dict[Any, Any], content: dict[Any, Any], folded: Fold) -> None:
        """Take a config's plain data as it was written and as it may be shown, and its layers."""
        self._written = dict(leaves(written))
        self._by_text = {tuple(map(str, place)): place for place in self._written}
        self._content = content
        self._folded = folded
        own = environment.own_variables(content)
        self._own: dict[Place, Variable] = {("env", each.name): each for each in own}

    def keys(self) -> list[str]:
        """Return every key that has a value, in the order of the config, then the launcher's."""
        return [key_of(place) for place in (*self._written, *self._own_places())]

    def explain(self, asked: Sequence[str] | None = None) -> list[Explained]:
        """Return the keys that were asked for and those below them; all of them where None is."""

        def is_asked(place: Place) -> bool:
            return asked is None or any(_lies_at_or_below(key_of(place), key) for key in asked)

        return [
            *(self._explain(place) for place in self._written if is_asked(place)),
            *(self._explain_own(place) for place in self._own_places() if is_asked(place)),
        ]

    def removed_by(self, key: str) -> Origin | None:
        """Return the override that has deleted a key, or the section around it."""
        for place, origin in self._folded.removed.items():
            if _lies_at_or_below(key, key_of(place)):
                return origin
        return None

    def _explain(self, place: Place) -> Explained:
        written = self._written[place]
        setting = self._setting(place)
        return Explained(
            key=key_of(place),
            value=self._value(place),
            written=masked(written, place),
            origin=setting.origin if setting else None,
            replaced=(*_replaced(setting), *self._replaced_own(place)),
            refers_to=tuple(self._references(place, written, {place})),
        )

    def _own_places(self) -> list[Place]:
        """Return the places of the variables that the launcher sets because nobody else does."""
        return [place for place in self._own if place not in self._written]

    def _explain_own(self, place: Place) -> Explained:
        variable = self._own[place]
        targets = [self._by_text[tuple(key.split("."))] for key in variable.follows_from]
        return Explained(
            key=key_of(place),
            value=variable.value,
            written=variable.value,
            origin=THE_LAUNCHER,
            replaced=(),
            refers_to=tuple(self._told(target) for target in targets),
        )

    def _replaced_own(self, place: Place) -> Iterator[Told]:
        if variable := self._own.get(place):
            yield Told(key=key_of(place), value=variable.value, origin=THE_LAUNCHER)

    def _told(self, place: Place) -> Told:
        setting = self._setting(place)
        origin = setting.origin if setting else None
        return Told(key=key_of(place), value=self._value(place), origin=origin)

    def _setting(self, place: Place) -> Setting | None:
        """Return the newest setting of a key whose value is the one that Hydra composed."""
        node, written = self._folded.root.at(place), self._written.get(place)
        if node is None or place not in self._written:
            return None
        if node.children is not None:
            # An empty section or list; a full one is no value of its own.
            is_right = not node.children and isinstance(written, type(node.children))
        else:
            is_right = is_same(node.setting.value, written)
        return node.setting if is_right else None

    def _value(self, place: Place) -> object:
        node: Any = self._content
        for part in place:
            node = node[part]
        return node

    def _references(self, place: Place, written: object, seen: set[Place]) -> Iterator[Told]:
        """Yield the keys that a value refers to, and those that their values refer to."""
        for text in referred_places(written, place):
            target = self._by_text.get(text)
            node = self._folded.root.at(text)
            if target is None and node is not None:
                # A section or list, whose keys have origins of their own.
                value = masked(node.setting.value, text)
                yield Told(key=key_of(text), value=value, origin=node.setting.origin)
            if target is None or target in seen:
                continue
            seen.add(target)
            yield self._told(target)
            yield from self._references(target, self._written[target], seen)


def _lies_at_or_below(key: str, section: str) -> bool:
    return key == section or key.startswith((f"{section}.", f"{section}["))


def _replaced(setting: Setting | None) -> Iterator[Told]:
    while setting is not None and (setting := setting.before) is not None:
        yield Told(
            key=key_of(setting.place),
            value=masked(setting.value, setting.place),
            origin=setting.origin,
        )


def explained_lines(each: Explained) -> Iterator[str]:
    """Yield the lines in which a person reads of one key."""
    yield f"{each.key}: {value_text(each.value)}"
    if each.origin is None:
        yield f"  {UNKNOWN}"
        return
    is_reference = isinstance(each.written, str) and _REFERENCE in each.written
    written = f", as {each.written}" if is_reference else ""
    yield f"  from {origin_text(each.origin)}{written}"
    refers = "follows from" if each.origin is THE_LAUNCHER else "refers to"
    for told in each.refers_to:
        yield f"  {refers} {told.key}: {value_text(told.value)}, {_from(told.origin)}"
    for told in each.replaced:
        key = "" if told.key == each.key else f"{told.key}: "
        yield f"  replaced {key}{value_text(told.value)}, {_from(told.origin)}"


def explained_data(each: Explained) -> dict[str, Any]:
    """Return the same as plain data that JSON can hold, with absolute paths."""
    return {
        "key": each.key,
        "value": each.value,
        "written": each.written,
        "origin": _origin_data(each.origin),
        "replaced": [_told_data(told) for told in each.replaced],
        "refers_to": [_told_data(told) for told in each.refers_to],
    }


def _told_data(told: Told) -> dict[str, Any]:
    value = repr(told.value) if told.value is SECTION else told.value
    return {"key": told.key, "value": value, "origin": _origin_data(told.origin)}


def _origin_data(origin: Origin | None) -> dict[str, Any] | str:
    if origin is None:
        return UNKNOWN
    path = origin.path or origin.file
    return {"file": path, "line": origin.line, "override": origin.override}


def value_text(value: object) -> str:
    """Return a value as a person writes it in YAML, or the words that stand for it."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    is_bare = isinstance(value, str) and (
        value in (NOT_SHOWN, MISSING) or (_REFERENCE in value and value.isprintable())
    )
    return str(value) if is_bare else shown(value)


def origin_text(origin: Origin) -> str:
    """Return an origin with the whole override, where it is one."""
    return f"command line, {origin.override}" if origin.file is None else str(origin)


def _from(origin: Origin | None) -> str:
    return UNKNOWN if origin is None else f"from {origin_text(origin)}"

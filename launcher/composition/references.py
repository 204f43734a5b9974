"""Refuse references between a config's values that would grow beyond all bounds.

Each `${key}` stands for all that the key holds, so ten lines that each name the one before ten
times stand for more text than a machine has memory. The sizes are added up here before any
reference is followed, each key once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

CHARACTERS_MAX = 1_000_000
"""Characters of all values of a config, every reference followed."""

_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select\s*:\s*)?(\.*)([\w.\[\]-]+)\s*(?=[,}])")
_WHOLE_REFERENCE = re.compile(r"\$\{\s*(\.*)([\w.\[\]-]+)\s*\}")
_BEGINNING = re.compile(r"(\\*)\$\{")
_DEPTH_MAX = 100


def foreign_resolvers(text: str) -> Iterator[str]:
    """Yield each resolver by which a text takes something from outside the config.

    That is the machine or the moment of rendering. A resolver that reads a text anew counts too,
    and so does a reference whose name is in quotes or holds another reference.
    """
    for found in _BEGINNING.finditer(text):
        name = _resolver_at(text, found.end())
        # One backslash makes text of what follows, two are a backslash.
        is_clear = name == "default_image" or _REFERENCE.match(text, found.end() - 2)
        if len(found[1]) % 2 == 0 and not is_clear:
            yield name or text[found.end() :].partition("}")[0]


def _resolver_at(text: str, start: int) -> str | None:
    """Return the name of the resolver whose reference has begun, None where it names a key."""
    depth = 0
    for at in range(start, len(text)):
        if text.startswith("${", at):
            depth += 1
        elif text[at] == ":" and depth == 0:
            return text[start:at].strip()
        elif text[at] == "}":
            depth -= 1
        if depth < 0:
            return None
    return None


def referred_places(text: object, place: tuple[Any, ...]) -> list[tuple[str, ...]]:
    """Return the places that the value at a place refers to, in the order of the text."""
    found = _REFERENCE.findall(text) if isinstance(text, str) else []
    return [_target(dots, key, place) for dots, key in found]


def referred_place(text: object, place: tuple[Any, ...]) -> tuple[str, ...] | None:
    """Return the place that a value is one reference to, None where it is anything else."""
    found = _WHOLE_REFERENCE.fullmatch(text) if isinstance(text, str) else None
    return _target(found[1], found[2], place) if found else None


def _target(dots: str, key: str, place: tuple[Any, ...]) -> tuple[str, ...]:
    # One dot is the section that holds the value, two are the one around that.
    base = place[: -len(dots)] if dots else ()
    return (*base, *re.findall(r"[^.\[\]]+", key))


def growth_problem(config: dict[str, Any]) -> str | None:
    """Return a message that names the first section that would be too large, else None.

    `config` is plain data with its references as they were written.
    """
    sizes = _Sizes(config)
    for key, value in config.items():
        if (size := sizes.of(value, (str(key),))) > CHARACTERS_MAX:
            return (
                f"{key} holds {size} characters, its references followed; allowed: at most "
                f"{CHARACTERS_MAX}"
            )
    return None


class _Sizes:
    """Works out how many characters values have, references followed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._known: dict[tuple[str, ...], int] = {}

    def of(self, node: object, place: tuple[str, ...]) -> int:
        """Return the size of what lies at a place; brackets and commas count as one each."""
        if isinstance(node, dict):
            return 1 + sum(self.of(value, (*place, str(key))) for key, value in node.items())
        if isinstance(node, list):
            return 1 + sum(self.of(value, (*place, str(i))) for i, value in enumerate(node))
        text = str(node)
        return (
            1 + len(text) + sum(self._of_target(target) for target in referred_places(text, place))
        )

    def _of_target(self, target: tuple[str, ...]) -> int:
        if target not in self._known:
            # Where keys refer to each other in a ring, which OmegaConf finds and names.
            self._known[target] = 0
            self._known[target] = self._at(target) if len(target) < _DEPTH_MAX else 0
        return self._known[target]

    def _at(self, place: tuple[str, ...]) -> int:
        node: object = self._config
        for index, part in enumerate(place):
            if isinstance(node, dict):
                node = node.get(part, "")
            elif isinstance(node, list):
                is_index = part.replace("_", "").isdecimal() and int(part) < len(node)
                node = node[int(part)] if is_index else ""
            else:
                # A section that is a reference itself.
                targets = referred_places(node, place[:index])
                return sum(self._of_target((*target, *place[index:])) for target in targets)
        return self.of(node, place)

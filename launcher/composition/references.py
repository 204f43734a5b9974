"""Refuse references between a config's values that would grow beyond all bounds.

Each `${key}` stands for all that the key holds, so ten lines that each name the one before ten
times stand for more text than a machine has memory. The sizes are added up here before any
reference is followed, each key once.
"""

from __future__ import annotations

import re
from typing import Any

CHARACTERS_MAX = 1_000_000
"""Characters of all values of a config, every reference followed."""

_REFERENCE = re.compile(r"\$\{\s*(?:oc\.[\w.]+:\s*)?(\.*)([\w.\[\]-]+)")


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
            1
            + len(text)
            + sum(self._of_target(dots, key, place) for dots, key in _REFERENCE.findall(text))
        )

    def _of_target(self, dots: str, key: str, place: tuple[str, ...]) -> int:
        # One dot is the section that holds the value, two are the one around that.
        base = place[: -len(dots)] if dots else ()
        target = (*base, *re.findall(r"[^.\[\]]+", key))
        if target not in self._known:
            # Where keys refer to each other in a ring, which OmegaConf finds and names.
            self._known[target] = 0
            self._known[target] = self.of(self._at(target), target)
        return self._known[target]

    def _at(self, place: tuple[str, ...]) -> object:
        node: object = self._config
        for part in place:
            if isinstance(node, dict):
                node = node.get(part, "")
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return ""
        return node

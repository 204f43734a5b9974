"""Texts of a recipe: their places, numbers written as texts, and changes of all texts. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

TEXT_SECTIONS = frozenset({"env", "labels", "node_selector", "required", "arguments"})
"""Open mappings of texts: variables of the workers, labels, and a program's arguments.

`required` is that of affinity.
"""


def to_text(value: Any) -> Any:
    """Return a number, true or false as YAML and most programs write it; anything else as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def is_text_place(place: Sequence[str | int]) -> bool:
    """Return whether what lies directly or deeper in this section is text."""
    return not TEXT_SECTIONS.isdisjoint(map(str, place))


def text_package_problem(group: str, shown: str) -> str | None:
    """Say why no group's file is put, by an @ behind the group, where its values are texts."""
    for section in re.findall(r"@([\w.:]+)", group):
        if is_text_place(re.split(r"[.:]", section)):
            return (
                f"{shown} puts a file into {section}, whose values are texts, and 1.10 in that "
                "file would be read as 1.1; begin the file with '# @package _global_', write its "
                f"keys below {section}, and leave @{section} out"
            )
    return None


def map_texts(node: Any, change: Callable[[str], Any]) -> Any:
    """Return plain data with what `change` makes of each text; keys stay."""
    if isinstance(node, dict):
        return {key: map_texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [map_texts(value, change) for value in node]
    return change(node) if isinstance(node, str) else node

"""Places in nested plain data, and the keys that people write for them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

Place: TypeAlias = tuple[Any, ...]
"""Keys and list indices from the root inwards."""


def key_of(place: Place) -> str:
    """Return a place as a person writes it, such as trainer.optimizer.lr or a.b[0].c."""
    text = ""
    for part in place:
        is_index = isinstance(part, int) and not isinstance(part, bool)
        text += f"[{part}]" if is_index else f".{part}" if text else str(part)
    return text


def leaves(node: object, place: Place = ()) -> Iterator[tuple[Place, object]]:
    """Yield each value that holds no others with its place; empty sections and lists are values."""
    if node and isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*place, key))
    elif node and isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*place, index))
    else:
        yield place, node


def is_same(one: object, other: object) -> bool:
    """Return whether two values are equal and both, or neither, true or false."""
    # Of two values that are not a number, neither equals the other.
    is_equal = one == other or (one != one and other != other)
    return is_equal and isinstance(one, bool) == isinstance(other, bool)

"""In which keys two configs differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.provenance.explained import value_text
from launcher.provenance.fold import SECTION, Fold
from launcher.provenance.place import Place, is_same, key_of


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""The value of a key on the side that does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that are compared."""

    name: str
    content: dict[Any, Any]
    """Plain data as it may be shown, references followed."""
    folded: Fold | None = None
    """Where it comes from; None where nobody asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key whose values are not the same."""

    place: Place
    values: tuple[object, object]


def find_differences(one: Any, other: Any, place: Place = ()) -> Iterator[Difference]:
    """Yield each key in which two plain data differ, in the order of the first.

    A key that is null and one that is not there are the same: a job has null for every optional
    key that its recipe leaves out.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        yield from _differing_parts(one, other, place)
    elif isinstance(one, list) and isinstance(other, list):
        yield from _differing_parts(dict(enumerate(one)), dict(enumerate(other)), place)
    elif not is_same(*(None if each is ABSENT else each for each in (one, other))):
        sections = [each if isinstance(each, dict) else {} for each in (one, other)]
        # A section that the other side does not have is told of by its keys alone.
        if not any(sections) or ABSENT not in (one, other):
            yield Difference(place=place, values=(_summary(one), _summary(other)))
        yield from _differing_parts(sections[0], sections[1], place)


def _differing_parts(
    one: dict[Any, Any], other: dict[Any, Any], place: Place
) -> Iterator[Difference]:
    for part in dict.fromkeys([*one, *other]):
        yield from find_differences(one.get(part, ABSENT), other.get(part, ABSENT), (*place, part))


def _summary(value: object) -> object:
    return SECTION if value and isinstance(value, dict) else value


def difference_lines(found: Difference, sides: Sequence[Side]) -> Iterator[str]:
    """Yield the lines in which a person reads of one difference, with origins where there are."""
    texts = [value_text(value) for value in found.values]
    yield f"{key_of(found.place)}: {texts[0]} -> {texts[1]}"
    for side in sides:
        node = side.folded.root.at(found.place) if side.folded else None
        if node is not None:
            yield f"  {side.name}: {node.setting.origin}"

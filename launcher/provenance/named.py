"""Say below a message where the values come from that it names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from launcher.composition.references import referred_places
from launcher.provenance.explained import value_text
from launcher.provenance.fold import Fold, TreeNode
from launcher.provenance.place import Place, key_of
from launcher.secrets import NOT_SHOWN, masked

_WORD = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+|\[\d+\])*")
_VALUE_CHARACTERS_MAX = 60


def add_origins(problems: Sequence[str], folded: Fold) -> list[str]:
    """Return messages, each with a line below it of the origins of the fields that it names.

    A field is told of once, and without its value below a message that does not show it.
    """
    told: set[Place] = set()
    found: list[str] = []
    for problem in problems:
        found.append(problem)
        origins = []
        for place, node in _named_fields(problem, folded):
            if place not in told:
                origins.append(_origin_of(place, node, is_shown=NOT_SHOWN not in problem))
                told.add(place)
        if origins:
            found.append(f"  {'; '.join(origins)}")
    return found


def _named_fields(message: str, folded: Fold) -> Iterator[tuple[Place, TreeNode]]:
    """Yield the fields that a message names, each with those that its value refers to.

    A key without its section, as in `trainer.num_devices 8 ... tensor_parallel 4`, is one of the
    section that was named before it. What a mistyped key may have meant is not named.
    """
    end = "; " if message.startswith("no key ") else "; closest: "
    section: Place = ()
    for index, word in enumerate(_WORD.findall(message.partition(end)[0])):
        place: Place = tuple(re.findall(r"[^.\[\]]+", word))
        if len(place) == 1 and index > 0:
            place = (*section, word) if section and "_" in word else ()
        node = folded.root.at(place) if place else None
        if node is None:
            continue
        section = place[:-1]
        yield place, node
        for target in referred_places(node.setting.value, place):
            if (referred := folded.root.at(target)) is not None:
                yield target, referred


def _origin_of(place: Place, node: TreeNode, *, is_shown: bool) -> str:
    key = key_of(node.setting.place)
    if node.children is not None:
        return f"{key}: {node.setting.origin}"
    text = value_text(masked(node.setting.value, place)) if is_shown else NOT_SHOWN
    if len(text) > _VALUE_CHARACTERS_MAX:
        text = f"{text[: _VALUE_CHARACTERS_MAX - 3]}..."
    return f"{key} {text}: {node.setting.origin}"

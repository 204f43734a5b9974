"""On which line of a YAML text each of its keys stands, by PyYAML's marks. Pure.

JSON is YAML, so that this serves job.json as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Lines:
    """The line of one value, and those of the values that it holds."""

    line: int | None = None
    """Counted from 1; None for what stands nowhere, as the sections around a group's file."""
    children: Mapping[str, Lines] = field(default_factory=dict)
    """By the key's text as it is written, or the index in a list."""

    def below(self, key: object) -> Lines:
        """Return those of a key, or an index; of one that is not known, the line of the whole."""
        return self.children.get(str(key)) or Lines(self.line)

    def embedded_in(self, package: list[str]) -> Lines:
        """Return those of the sections around a file, the outermost first."""
        found = self
        for key in reversed(package):
            found = Lines(None, {key: found})
        return found


def parse_lines(text: str) -> Lines:
    """Return the lines of a text that was read as YAML before, and is of a bounded size."""
    root = yaml.compose(text, _Loader)
    return Lines(None, _children(root))


def _children(node: yaml.Node | None) -> dict[str, Lines]:
    if isinstance(node, yaml.SequenceNode):
        return {
            str(index): Lines(item.start_mark.line + 1, _children(item))
            for index, item in enumerate(node.value)
        }
    found: dict[str, Lines] = {}
    if not isinstance(node, yaml.MappingNode):
        return found
    for key, value in node.value:
        if key.tag == _MERGE_TAG:
            found = {**_merged(value), **found}
    own = {
        str(key.value): Lines(key.start_mark.line + 1, _children(value))
        for key, value in node.value
        if key.tag != _MERGE_TAG
    }
    return {**found, **own}


def _merged(node: yaml.Node) -> dict[str, Lines]:
    """Return what `<<` takes from a mapping, or from several, the first of which wins."""
    if not isinstance(node, yaml.SequenceNode):
        return _children(node)
    found: dict[str, Lines] = {}
    for each in node.value:
        found = {**_children(each), **found}
    return found

"""Put files and overrides over each other as Hydra does, and keep who has set what. Pure.

- A section over a section sets key by key; anything else replaces what was there.
- `???` sets a key that is not there, and changes none that is.
- A list is replaced as a whole. An override may set one of its items.
- A section that is put over a reference to another section begins with a copy of that one.
- An override of a key below a reference puts a section in the reference's place; a deletion of one
  deletes what the reference leads to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.composition.references import referred_place
from launcher.provenance.lines import Lines
from launcher.provenance.place import Place

MISSING = "???"
"""The value of a key that whoever runs a recipe has to set."""
_REFERENCES_MAX = 32
"""References to references that are followed; OmegaConf refuses those that form a ring."""


class _SectionValue:
    """What a setting has for a value where a section was set: its keys have settings of their own.

    There is one, SECTION.
    """

    def __repr__(self) -> str:
        return "a section"


SECTION = _SectionValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who has set a value: a line of a file, or an override of the command line."""

    file: str | None = None
    """As a person finds it from the current folder; None for an override."""
    path: str | None = None
    """The same file's absolute path."""
    line: int | None = None
    override: str | None = None
    """The override that set the value, or that chose the file; None where no override did."""
    is_recipe: bool = False
    """Whether the file is a recipe, not a group's."""

    def __str__(self) -> str:
        if self.file is None:
            return "command line"
        line = "" if self.line is None else f", line {self.line}"
        return f"{self.file}{line}" + (f" ({self.override})" if self.override else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value that a key was given, and the one whose place it took."""

    place: Place
    """That of the key; of a value that was replaced it may be a section around the key."""
    value: object
    """Plain data as it was written; SECTION for a section."""
    origin: Origin
    before: Setting | None = None


@dataclass(frozen=True, slots=True)
class TreeNode:
    """What lies at one place: its newest setting, and what it holds."""

    setting: Setting
    children: dict[Any, TreeNode] | list[TreeNode] | None = None
    """None for a value that holds no others."""

    def at(self, place: Place) -> TreeNode | None:
        """Return the node at a place below this one, None where there is none."""
        node: TreeNode | None = self
        for part in place:
            node = None if node is None else _child(node, part)
        return node


@dataclass(frozen=True, slots=True)
class FileLayer:
    """A file's content, in the sections that its package names."""

    content: dict[Any, Any]
    lines: Lines
    origin: Origin
    """Of the file as a whole, without a line."""


@dataclass(frozen=True, slots=True)
class OverrideLayer:
    """One override of the command line: a key's value, or the deletion of a key."""

    place: Place
    value: object
    origin: Origin
    is_deletion: bool = False


@dataclass(frozen=True, slots=True)
class Fold:
    """All layers on each other."""

    root: TreeNode
    removed: dict[Place, Origin] = field(default_factory=dict)
    """Keys that an override has deleted."""


def fold(layers: Iterable[FileLayer | OverrideLayer]) -> Fold:
    """Return the layers on each other, the first of them lowest."""
    folded = Fold(TreeNode(Setting(place=(), value=SECTION, origin=Origin()), {}))
    for layer in layers:
        if isinstance(layer, FileLayer):
            _merge(folded.root, folded.root, (), layer.content, layer)
        elif layer.is_deletion:
            _delete(folded, layer)
        else:
            _override(folded.root, layer)
    return folded


def _child(node: TreeNode, part: Any) -> TreeNode | None:
    if isinstance(node.children, dict):
        return node.children.get(part)
    if node.children is None or not str(part).isdecimal() or int(part) >= len(node.children):
        return None
    return node.children[int(part)]


def _set_child(node: TreeNode, part: Any, child: TreeNode) -> None:
    if isinstance(node.children, dict):
        node.children[part] = child
    elif node.children is not None:
        node.children[int(part)] = child


def _merge(
    root: TreeNode, section: TreeNode, place: Place, content: dict[Any, Any], layer: FileLayer
) -> None:
    """Put a section's content over a section, key by key."""
    for key, value in content.items():
        old, at = _child(section, key), (*place, key)
        if old is not None and (target := _referred(root, old, at)):
            old = _copied(target)
            _set_child(section, key, old)
        if old is not None and value == MISSING:
            continue
        below = replace(layer, lines=layer.lines.below(key))
        if old is not None and isinstance(old.children, dict) and isinstance(value, dict):
            _merge(root, old, at, value, below)
        else:
            _set_child(section, key, _build(value, at, below, old.setting if old else None))


def _copied(node: TreeNode) -> TreeNode:
    children = node.children
    if isinstance(children, dict):
        children = {key: _copied(each) for key, each in children.items()}
    elif children is not None:
        children = [_copied(each) for each in children]
    return TreeNode(node.setting, children)


def _build(value: object, place: Place, layer: FileLayer, before: Setting | None) -> TreeNode:
    """Return new nodes for a value, all of which replace the same setting."""
    origin, lines = replace(layer.origin, line=layer.lines.line), layer.lines
    children: dict[Any, TreeNode] | list[TreeNode] | None = None
    if isinstance(value, dict):
        children = {
            key: _build(each, (*place, key), replace(layer, lines=lines.below(key)), before)
            for key, each in value.items()
        }
    elif isinstance(value, list):
        children = [
            _build(each, (*place, index), replace(layer, lines=lines.below(index)), before)
            for index, each in enumerate(value)
        ]
    shown = SECTION if isinstance(value, dict) else value
    return TreeNode(Setting(place=place, value=shown, origin=origin, before=before), children)


def _override(root: TreeNode, layer: OverrideLayer) -> None:
    source = FileLayer({}, Lines(), layer.origin)
    node = root
    for depth, part in enumerate(layer.place[:-1], start=1):
        place = layer.place[:depth]
        child = _child(node, part)
        if child is None or child.children is None:
            child = _build({}, place, source, child.setting if child else None)
            _set_child(node, part, child)
        node = child
    last = layer.place[-1]
    old = _child(node, last)
    if old is not None and isinstance(old.children, dict) and isinstance(layer.value, dict):
        _merge(root, old, layer.place, layer.value, source)
    else:
        before = old.setting if old else None
        _set_child(node, last, _build(layer.value, layer.place, source, before))


def _delete(folded: Fold, layer: OverrideLayer) -> None:
    node: TreeNode | None = folded.root
    for depth, part in enumerate(layer.place[:-1], start=1):
        found = None if node is None else _child(node, part)
        node = found and (_referred(folded.root, found, layer.place[:depth]) or found)
    if node is not None and isinstance(node.children, dict):
        node.children.pop(layer.place[-1], None)
        folded.removed[layer.place] = layer.origin


def _referred(root: TreeNode, node: TreeNode, place: Place) -> TreeNode | None:
    """Return the section or list that a value refers to, None where it refers to none."""
    if node.children is not None:
        return None
    found: TreeNode | None = node
    for _ in range(_REFERENCES_MAX):
        if found is None or found.children is not None:
            break
        target = referred_place(found.setting.value, place)
        found, place = (None, ()) if target is None else (root.at(target), target)
    return found if found is not None and found.children is not None else None

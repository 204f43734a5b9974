"""Refuse a YAML file that would grow beyond all bounds when it is read, or is read as another.

An alias costs a few characters and stands for a whole mapping, so nine lines of nested aliases
hold hundreds of millions of values. They are counted here from the parser's events, one pass and
no recursion, before anything is built from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import RecipeError
from launcher.written.scalars import find_scalars
from resilience.plain_files import read_plain_text

NODES_MAX = 20_000
"""Keys and values of one file, each alias counted as all that it stands for.

Hydra and OmegaConf take 0.15 ms for each, so that a file of this size is answered within 5 s; the
largest file of ours has some hundred.
"""
DEPTH_MAX = 100
"""Mappings and lists within each other, through aliases as well."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file that is not too large to be read.

    Raises RecipeError that names file and line where it is too large, too deep, holds itself, is no
    UTF-8 text, has a key twice, or a value that YAML reads as another than most people.
    """
    try:
        text = read_plain_text(path, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no UTF-8 text: {error}") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    check_yaml(text, path)
    return text


def check_yaml(text: str, path: Path | str) -> None:
    """Raise RecipeError where a file of this text is not to be read."""
    check_yaml_size(text, path)
    with naming_file(path):
        for scalar in find_scalars(text):
            if scalar.problem:
                raise RecipeError(f"{path}, line {scalar.line}: {scalar.problem}")


def keep_texts(content: Any, text: str, place: tuple[str, ...] = ()) -> None:
    """Give values that are texts, as those of `env`, the characters that a file has of them.

    `content` is what the text was read as, and `place` the section that its keys lie in.
    """
    for scalar in find_scalars(text, place):
        if scalar.is_changed_text:
            *sections, last = scalar.place[len(place) :]
            node = content
            for section in sections:
                node = node[section]
            node[last] = scalar.text


@contextmanager
def naming_file(file: Path | str) -> Iterator[None]:
    """Name the file in what is wrong with a value of it that YAML or OmegaConf cannot take.

    Raises RecipeError; what says where it is by itself passes.
    """
    try:
        yield
    except yaml.YAMLError as error:
        raise RecipeError(_yaml_message(error, file)) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{file}: {str(error).partition(chr(10))[0]}") from error


def check_yaml_size(text: str, path: Path | str) -> None:
    """Raise RecipeError where the file's values are too many or too deep.

    A text that is too long to be judged by its characters is parsed, and has to be YAML.
    """
    if _is_small(text):
        return
    size = _Size()
    try:
        for event in yaml.parse(text, _Loader):
            if problem := size.problem_after(event):
                mark = event.start_mark
                line = f", line {mark.line + 1}" if mark else ""
                raise RecipeError(f"{path}{line}: {problem}")
    except yaml.YAMLError as error:
        raise RecipeError(_yaml_message(error, path)) from error


def _is_small(text: str) -> bool:
    """Return whether the bounds hold for any text of these characters; costs little.

    Without aliases each key or value takes a character at least. A block lies one deeper for each
    column that is indented or taken by a dash, and a flow for each bracket.
    """
    if len(text) >= NODES_MAX or "&" in text:
        return False
    columns = max((len(line) - len(line.lstrip(" -?:")) for line in text.splitlines()), default=0)
    return columns + text.count("[") + text.count("{") + 2 <= DEPTH_MAX


def _yaml_message(error: yaml.YAMLError, file: Path | str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{file}: broken YAML: {error}"
    problem = getattr(error, "problem", None) or "broken YAML"
    return f"{file}, line {mark.line + 1}, column {mark.column + 1}: {problem}"


class _Size:
    """Counts the nodes of a document while its events go by."""

    def __init__(self) -> None:
        # Of each open mapping or list: its anchor, its nodes so far, the depth below it.
        self._open: list[tuple[str | None, list[int]]] = []
        # (nodes, depth) of what an anchor names; None while that is still open.
        self._anchors: dict[str, tuple[int, int] | None] = {}
        self._num_nodes = 0

    def problem_after(self, event: yaml.Event) -> str | None:
        """Count an event and return what is wrong by then."""
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open.append((event.anchor, [1, 0]))
            if event.anchor:
                self._anchors[event.anchor] = None
            self._num_nodes += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, (nodes, depth) = self._open.pop()
            if anchor:
                self._anchors[anchor] = nodes, depth + 1
            self._add(nodes, depth + 1)
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor:
                self._anchors[event.anchor] = 1, 0
            self._num_nodes += 1
            self._add(1, 0)
        elif isinstance(event, yaml.AliasEvent) and event.anchor:
            return self._alias_problem(event.anchor)
        return self._bound_problem(0)

    def _alias_problem(self, anchor: str) -> str | None:
        # One that is not known is an error that the reader of the file names.
        found = self._anchors.get(anchor, (1, 0))
        if found is None:
            return f"*{anchor} stands within &{anchor}, so that it would hold itself"
        nodes, depth = found
        self._num_nodes += nodes
        self._add(nodes, depth)
        return self._bound_problem(depth)

    def _add(self, nodes: int, depth: int) -> None:
        """Count what has just ended into the mapping or list that holds it."""
        if self._open:
            counts = self._open[-1][1]
            counts[0] += nodes
            counts[1] = max(counts[1], depth)

    def _bound_problem(self, depth_below: int) -> str | None:
        if self._num_nodes > NODES_MAX:
            return (
                f"the file has {self._num_nodes} keys and values by here, each alias counted as "
                f"all that it stands for; allowed: at most {NODES_MAX}"
            )
        if len(self._open) + depth_below > DEPTH_MAX:
            return (
                f"mappings and lists lie {len(self._open) + depth_below} deep within each other; "
                f"allowed: at most {DEPTH_MAX}"
            )
        return None

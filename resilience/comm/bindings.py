"""Where a framework keeps its process groups: found once, set to those of a generation ever after.

A framework stores groups in dozens of its objects, and none of them asks for new ones. gloo's
groups go on working after their generation, so a forgotten reference would not show. The places
are found by a walk over what the objects refer to, when they have just been made; it looks at
nothing else, so no heap is walked, and during a recovery nothing is.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from resilience.comm.world import drop_groups
from resilience.errors import StateError

_OWN_REFERENCES = 3
"""To a group of a list that is looked at: the list's, the loop's and the look's own."""
_LEAVES = (torch.Tensor, str, bytes, int, float, type, types.ModuleType, torch.dtype, torch.device)


class Bindings:
    """The places in what `roots` refer to that hold one of `groups`.

    Groups are known by identity, and replaced by whatever has their index in the next list.
    Raises StateError for a group that is none of them, or that stands where it cannot be replaced.
    """

    def __init__(self, groups: Sequence[ProcessGroup], roots: Sequence[object]) -> None:
        numbers = {id(group): number for number, group in enumerate(groups)}
        self._places: list[tuple[Any, Any, int]] = []
        for holder, key, group in _find_places(roots):
            if id(group) not in numbers:
                raise StateError(f"{key!r} of a {type(holder).__name__} holds an unknown group")
            self._places.append((holder, key, numbers[id(group)]))

    def __len__(self) -> int:
        return len(self._places)

    def rebind(self, groups: Sequence[ProcessGroup]) -> None:
        """Put the groups into the places; whoever calls holds the groups before by himself."""
        for holder, key, number in self._places:
            if key is None:
                holder.cell_contents = groups[number]
            else:
                holder[key] = groups[number]


class Outlived:
    """Groups of generations that are over, for as long as anybody else refers to them.

    The graph of an aborted step refers to the groups that it communicated with, and modules keep
    tensors of it until their next forward pass replaces them. Were that reference the last one, the
    training thread would wait for the group's threads to end, with the interpreter's lock held,
    and they for that lock (seen on torch 2.13 with gloo). So these references are the last.
    """

    def __init__(self) -> None:
        self._groups: list[ProcessGroup] = []

    def add(self, groups: Sequence[ProcessGroup]) -> None:
        """Take groups that the caller lets go of now."""
        self._groups.extend(groups)

    def drop(self) -> None:
        """Let go of those that nobody else refers to, in a thread; cheap, once a step."""
        if not self._groups:
            return
        kept: list[ProcessGroup] = []
        last: list[ProcessGroup | None] = []
        for group in self._groups:
            (last if sys.getrefcount(group) <= _OWN_REFERENCES else kept).append(group)
        self._groups = kept
        if last:
            # The loop's own reference would outlive the thread's.
            del group
            drop_groups(last)


def _find_places(roots: Sequence[object]) -> Iterator[tuple[Any, Any, ProcessGroup]]:
    """Yield each dict or list with the key, or closure cell, that holds a group."""
    seen: set[int] = set()
    # Kept, so that no identity is given twice within the walk.
    stack: list[Any] = list(roots)
    kept: list[Any] = []
    while stack:
        each = stack.pop()
        is_leaf = isinstance(each, _LEAVES) and not isinstance(each, torch.nn.Parameter)
        if is_leaf or id(each) in seen:
            continue
        seen.add(id(each))
        kept.append(each)
        for holder, key, value in _references(each):
            if not isinstance(value, ProcessGroup):
                stack.append(value)
            elif holder is None:
                raise StateError(f"a {type(each).__name__} holds a group for good")
            else:
                yield holder, key, value


def _references(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (holder, key, what it refers to); without a holder it cannot be replaced."""
    if isinstance(value, types.CellType):
        try:
            yield value, None, value.cell_contents
        except ValueError:  # empty
            return
    elif isinstance(value, types.FunctionType):
        yield from ((None, None, each) for each in value.__closure__ or ())
    elif isinstance(value, types.MethodType):
        yield from ((None, None, each) for each in (value.__self__, value.__func__))
    elif isinstance(value, dict):
        yield from ((value, key, value[key]) for key in list(value))
    elif isinstance(value, list):
        yield from ((value, number, each) for number, each in enumerate(value))
    elif isinstance(value, (tuple, set, frozenset)):
        yield from ((None, None, each) for each in value)
    else:
        content = getattr(value, "__dict__", None)
        if isinstance(content, dict):
            yield from ((content, key, content[key]) for key in list(content))

"""Looks for state that a program's steps change and that protect was not given.

Such state is neither put back where a step is run again nor given to a process that joins. The
variables of the loop's frame and of its module are compared at the begin of the first steps, into
containers and attributes two levels deep. A variable that the loop's body assigns before it reads
it carries nothing from step to step. No method of the program's objects is called.
"""

from __future__ import annotations

import ast
import linecache
import random
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from resilience.protection.state import Stateful

NUM_STEPS = 4
_DEPTH_MAX = 2
_ITEMS_MAX = 100
_BYTES_MAX = 1 << 16
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of installed packages; an environment may have packages of others."""
_OWN = Path(__file__).parents[1]


class StateWatch:
    """The variables of one program; `known` is what protect was given."""

    def __init__(self, known: Collection[object], ignore: Collection[str]) -> None:
        self._known: set[int] = set()
        self._modules = [each for root in known for each in _modules(root)]
        self.know(known)
        self._ignore = ignore
        self._num_looks = 0
        self._before: dict[str, object] | None = None
        self._changed: dict[str, None] = {}

    def know(self, objects: Iterable[object]) -> None:
        """Leave out objects whose state is looked after, with the parts of modules."""
        for each in objects:
            self._known.add(id(each))
            if isinstance(each, nn.Module):
                parts = (*each.modules(), *each.parameters(), *each.buffers())
                self._known |= {id(part) for part in parts}

    def look(self, frame: FrameType | None) -> None:
        """Compare the variables with those of the step before; names what changes once."""
        self._num_looks += 1
        if self._num_looks > NUM_STEPS:
            self._before = None
            return
        try:
            self._look(frame)
        except Exception as error:  # noqa: BLE001 - objects of the program may fail in any way
            self._num_looks = NUM_STEPS
            sys.stderr.write(f"protect did not look for state that it was not given: {error!r}\n")

    def _look(self, frame: FrameType | None) -> None:
        while frame is not None and _is_installed(frame.f_code.co_filename):
            frame = frame.f_back  # such as a bar that shows the progress of the loop
        assigned = (
            None if frame is None else find_assigned(frame.f_code.co_filename, frame.f_lineno)
        )
        if frame is None or assigned is None:
            return
        now = {
            name: self._trace(value, 0)
            for name, value in _variables(frame).items()
            if name not in assigned and name not in self._ignore and not name.startswith("__")
        }
        for module in self._modules:
            for name, value in _attributes(module).items():
                if name not in self._ignore:
                    key = f"{name} of a {type(module).__name__}"
                    now[key] = (now.get(key), self._trace(value, 1))
        before, self._before = self._before, now
        if before is not None:
            changed = (name for name in before if name in now and now[name] != before[name])
            self._changed.update(dict.fromkeys(changed))
        if self._num_looks == NUM_STEPS and self._changed:
            sys.stderr.write(
                f"protect was not given {', '.join(self._changed)}: a step changes it, and a step "
                "that is run again, or a new process, will have another value. Use run.index for "
                "a counter, give objects with state_dict and load_state_dict in also=, or name it "
                "in ignore=\n"
            )

    def _trace(self, value: Any, depth: int) -> object:
        """Return what differs once a value has changed; nothing for what is not looked into."""
        if id(value) in self._known or isinstance(value, type):
            return None
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value if value == value else "nan"
        if isinstance(value, Tensor):
            is_counted = not value.is_inference()
            return id(value), is_counted and value._version  # noqa: SLF001 - torch's count of writes
        if isinstance(value, np.ndarray):
            return value.tobytes() if value.nbytes <= _BYTES_MAX else id(value)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return value.getstate()
        if depth > _DEPTH_MAX:
            return None
        return self._trace_parts(value, depth + 1)

    def _trace_parts(self, value: Any, depth: int) -> object:
        if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
            items = islice(value.items(), _ITEMS_MAX)
            return len(value), [(str(key), self._trace(each, depth)) for key, each in items]
        if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
            return len(value), [self._trace(each, depth) for each in islice(value, _ITEMS_MAX)]
        if isinstance(value, nn.Module):
            parts = (*value.parameters(), *value.buffers())
            return [self._trace(each, depth) for each in parts]
        own = sys.modules.get(type(value).__module__)
        is_own = own is not None and not _is_installed(getattr(own, "__file__", None) or "")
        if is_own or isinstance(value, Stateful):
            found = getattr(value, "__dict__", {})
            return {name: self._trace(each, depth) for name, each in found.items()}
        return None


def _modules(root: object) -> Iterator[nn.Module]:
    """Yield the modules whose classes are the program's own."""
    for each in root.modules() if isinstance(root, nn.Module) else ():
        own = sys.modules.get(type(each).__module__)
        if own is not None and not _is_installed(getattr(own, "__file__", None) or ""):
            yield each


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = vars(module).items()
    return {name: each for name, each in found if name[0] != "_" and name != "training"}


def _variables(frame: FrameType) -> dict[str, Any]:
    own = dict(frame.f_locals)
    return own if frame.f_locals is frame.f_globals else {**frame.f_globals, **own}


def _is_installed(path: str) -> bool:
    if path.startswith("<frozen") or not path:
        return True
    is_package = not _PACKAGES.isdisjoint(Path(path).parts)
    return is_package or path.startswith(_INSTALLED) or _OWN in Path(path).parents


def find_assigned(path: str, line: int) -> set[str] | None:
    """Return the names that the body of the loop at a line assigns before it reads them.

    None where the source is not there, or has no `for` at that line.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return None
    found = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.For) and each.lineno <= line <= (each.iter.end_lineno or 0)
    ]
    if not found:
        return None
    uses: dict[str, bool] = {}
    for part in (found[-1].target, *found[-1].body):
        for name, is_read in _uses(part):
            uses.setdefault(name, is_read)
    return {name for name, is_read in uses.items() if not is_read}


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that a statement uses, in order, and whether it reads each."""
    if isinstance(node, ast.Name):
        yield node.id, isinstance(node.ctx, ast.Load)
    elif isinstance(node, ast.AugAssign):
        yield from _uses(node.value)
        if isinstance(node.target, ast.Name):
            yield node.target.id, True
        else:
            yield from _uses(node.target)
    else:
        fields = sorted(ast.iter_fields(node), key=lambda each: each[0] in ("target", "targets"))
        if isinstance(node, (ast.For, ast.comprehension)):
            fields = [(name, getattr(node, name)) for name in ("iter", "target", *node._fields[2:])]
        for _, value in fields:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _uses(each)

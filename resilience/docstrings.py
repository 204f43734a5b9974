"""Read the docstrings of a model's fields: the text that stands below each field.

pydantic does the same with `use_attribute_docstrings`, but only while it makes
a class, so that every start of the launcher would pay for reading its own
source. For classes that exist pydantic has no public way. Of the launcher only
the command that prints the recipe schema may import this module.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring of each field that has one, as one line, inherited fields included.

    The model and its bases have to stand at the top level of their modules.
    Raises OSError where a module's source is not installed.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings_by_class(base.__module__).get(base.__name__, {})
    return found


@cache
def _docstrings_by_class(module: str) -> dict[str, dict[str, str]]:
    """Parse a module once, as most of them hold many models."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _docstrings(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docstrings(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for pair in pairwise(node.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found

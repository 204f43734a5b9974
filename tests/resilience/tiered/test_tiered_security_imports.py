"""No pickle on our path: what could load one is imported nowhere, but where it is restricted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import resilience.tiered

FOLDER = Path(resilience.tiered.__file__).parent
FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
RESTRICTED = "aws_format.py"
"""Reads the pickles of AWS's library, of which it lets nothing come in but data."""


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def torch_loads(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "torch.save"}:
            yield node


def test_no_file_loads_pickles() -> None:
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        found = {each.partition(".")[0] for each in imported(tree)} & FORBIDDEN
        loads = [each for each in torch_loads(tree) if "weights_only=True" not in ast.unparse(each)]

        assert not loads, path
        assert not found or path.name == RESTRICTED, path


def test_restricted_one_makes_nothing_of_what_a_pickle_names() -> None:
    """It may know the format; the machine that runs whatever it is told stays out."""
    tree = ast.parse((FOLDER / RESTRICTED).read_bytes())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}

    assert not calls & {"pickle.load", "pickle.loads", "pickle.Unpickler"}

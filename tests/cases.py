"""Cases of parametrised tests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow(*values: Any, **options: Any) -> ParameterSet:
    """Return a case for `make test-long` alone: one that `make test` runs shows nearly the same."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def grid(*axes: Sequence[ParameterSet], fast: Collection[str]) -> list[ParameterSet]:
    """Return all combinations of the axes' cases, whose ids are joined; all but `fast` are slow."""
    cases = {}
    for parts in itertools.product(*axes):
        name = "-".join(str(each.id) for each in parts)
        values = [value for each in parts for value in each.values]
        cases[name] = (pytest.param if name in fast else slow)(*values, id=name)
    assert set(fast) <= set(cases), set(fast) - set(cases)
    return list(cases.values())

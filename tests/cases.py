"""Cases of parametrised tests."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow(*values: Any) -> ParameterSet:
    """Return a case for `make test-long` alone: one that `make test` runs shows nearly the same."""
    return pytest.param(*values, marks=pytest.mark.slow)

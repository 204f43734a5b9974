from __future__ import annotations

from tests.training.conftest import reference, workers

__all__ = ["reference", "workers"]

from __future__ import annotations

from tests.recipes_training.conftest import reference, workers

__all__ = ["reference", "workers"]

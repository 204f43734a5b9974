from __future__ import annotations

from tests.recipes_training.conftest import reference, workers
from tests.scenarios.recovery.conftest import undisturbed

__all__ = ["reference", "undisturbed", "workers"]

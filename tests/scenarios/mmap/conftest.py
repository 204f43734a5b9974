from __future__ import annotations

from tests.scenarios.recovery.conftest import undisturbed
from tests.training.conftest import reference, workers

__all__ = ["reference", "undisturbed", "workers"]

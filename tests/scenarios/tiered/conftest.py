from __future__ import annotations

from tests.scenarios.recovery.conftest import undisturbed
from tests.training.conftest import workers

__all__ = ["undisturbed", "workers"]

from __future__ import annotations

from tests.launcher.conftest import team

__all__ = ["team"]

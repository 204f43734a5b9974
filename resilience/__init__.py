"""Keep a training run going through faults.

This is what may be called from a program of one's own, by semantic versioning; docs/scripts.md
lists it. Modules below this package that no page names are private.
"""

from typing import TYPE_CHECKING, Any

from resilience.script import RankInfo, log, rank_info

if TYPE_CHECKING:
    from resilience.protection.run import Run, protect

__all__ = ["RankInfo", "Run", "__version__", "log", "protect", "rank_info"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name in {"Run", "protect"}:
        from resilience.protection import run

        return getattr(run, name)
    raise AttributeError(f"module 'resilience' has no attribute {name!r}")

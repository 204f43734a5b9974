"""Keep a training run going through faults.

This is what may be called from a program of one's own, by semantic versioning; docs/scripts.md
lists it. Modules below this package that no page names are private.
"""

from resilience.script import RankInfo, log, rank_info

__all__ = ["RankInfo", "__version__", "log", "rank_info"]
__version__ = "0.1.0"

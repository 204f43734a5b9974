"""What one node's checkpoint daemon is told, the same on every cluster kind.

Where it listens and which nodes there are is the cluster's own business.
"""

from __future__ import annotations

from launcher.job import Job
from launcher.job.tiered_memory import budget_mib
from resilience.node_config import MemorydConfig


def memoryd_config(
    job: Job, *, drain_s: float | None = None, is_external: bool = False
) -> MemorydConfig | None:
    """Return what the daemons of all nodes are told, None of a job without them.

    `drain_s` is how long one may send to the store when it is to end; None leaves that to it.
    """
    settings = job.memoryd
    if settings is None:
        return None
    return MemorydConfig(
        is_external=is_external,
        budget_mib=budget_mib(job, settings),
        ram=settings.ram,
        store=settings.store,
        http_port=settings.http_port,
        lease_s=settings.lease_s,
        drain_s=drain_s,
    )

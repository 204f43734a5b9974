"""The run's token: its agents and checkpoint daemons let nobody in who does not know it.

One token for both. No rendered file holds its value, since scripts and manifests are looked at and
committed; the script of a run makes it, or a submission.
"""

from __future__ import annotations

from launcher.job import Job
from launcher.job.cluster import K8sCluster


def own_token_file(job: Job) -> str | None:
    """Return the file that the recipe names, None where the run makes one."""
    return job.memoryd.token_file if job.memoryd else None


def token_secret_name(job: Job) -> str | None:
    """Return the Secret that a Kubernetes job's pods wait for, None where they wait for none."""
    cluster = job.cluster
    if not isinstance(cluster, K8sCluster) or own_token_file(job):
        return None
    return f"{job.name}-token"

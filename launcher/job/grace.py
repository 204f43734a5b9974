"""How long a node has from the moment that it is asked to end, on each kind of cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.cluster import K8sCluster, LocalCluster, SlurmCluster
from launcher.job.content import JobContent
from resilience.settings import CLOSE_TIMEOUT_S, DRAIN_S

_AGENT_END_S = 5
"""What the agent itself may take when its workers have ended."""
_USUAL_S = 30.0
"""So long it gives them by itself."""
_LEAST_S = 1


def workers_grace_s(job: JobContent) -> float | None:
    """Return how long workers may take to end where the cluster asks their agent to.

    None where that is no more than they have anyway.
    """
    elastic, given_s = job.resilience.elastic, _given_s(job)
    if elastic and elastic.graceful_shutdown_timeout_s:
        return elastic.graceful_shutdown_timeout_s
    # Whoever leaves a run that goes on has to be gone before it is killed.
    return given_s if given_s is not None and (elastic or given_s > _USUAL_S) else None


def grace_rules(job: JobContent) -> Iterator[str]:
    """Yield why a node could not leave a run that goes on before the cluster kills it."""
    cluster, elastic = job.cluster, job.resilience.elastic
    is_hyperpod = isinstance(cluster, K8sCluster) and cluster.job_kind == "hyperpod"
    if elastic is None or is_hyperpod or isinstance(cluster, LocalCluster):
        return
    key, own_s, given_s = _cluster_key(cluster), _own_s(job), _given_s(job)
    value, asked_s = getattr(cluster, key), elastic.graceful_shutdown_timeout_s or 0
    field = "resilience.elastic.graceful_shutdown_timeout_s"
    if given_s is None:
        if asked_s:
            yield (
                f"{field} {asked_s} needs cluster.{key}, which is null; set it to at least "
                f"{asked_s + own_s}"
            )
    elif given_s < _LEAST_S:
        yield (
            f"cluster.{key} {value} is too short for resilience.elastic: a node that is asked to "
            f"leave needs {own_s} s for its own end; allowed: at least "
            f"{own_s + max(_LEAST_S, asked_s)}"
        )
    elif asked_s > given_s:
        yield (
            f"{field} {asked_s} is more than the {given_s} s that cluster.{key} {value} leaves the "
            f"workers; allowed: at most {given_s}, or cluster.{key} of at least {asked_s + own_s}"
        )


def _given_s(job: JobContent) -> int | None:
    """Return what the cluster's time for a node leaves its workers, None where it sets none."""
    cluster = job.cluster
    if isinstance(cluster, LocalCluster):
        return None
    seconds: int | None = getattr(cluster, _cluster_key(cluster))
    return None if seconds is None else seconds - _own_s(job)


def _cluster_key(cluster: K8sCluster | SlurmCluster) -> str:
    return "termination_grace_s" if isinstance(cluster, K8sCluster) else "signal_before_end_s"


def _own_s(job: JobContent) -> int:
    """Return what a node needs when its workers have ended; a pod's daemon has its own time."""
    daemon_s = 0.0
    if job.memoryd and isinstance(job.cluster, SlurmCluster):
        daemon_s = CLOSE_TIMEOUT_S + (DRAIN_S if job.memoryd.store else 0)
    return _AGENT_END_S + round(daemon_s)

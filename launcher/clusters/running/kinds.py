"""Which cluster a run is on."""

from __future__ import annotations

from launcher.clusters.running.cluster import Cluster
from launcher.job import Job
from launcher.job.cluster import K8sCluster, LocalCluster


def cluster_of(job: Job) -> Cluster:
    """Return the cluster that a job runs on. Asks nobody."""
    if isinstance(job.cluster, LocalCluster):
        from launcher.clusters.running.local import LocalMachine

        return LocalMachine()
    if isinstance(job.cluster, K8sCluster):
        from launcher.clusters.running.kubernetes import KubernetesRuns

        return KubernetesRuns()
    from launcher.clusters.running.slurm import SlurmRuns

    return SlurmRuns()

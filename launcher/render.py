"""Render a job into the files that its cluster runs, by cluster kind.

A pure function of the job and the templates' texts: the same inputs give the
same bytes, and no cluster, network or folder is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.clusters.agent import NO_INTENT, Intent
from launcher.job import Job
from launcher.job.cluster import K8sCluster, SlurmCluster
from launcher.rundir import JOB_FILE


def render(job: Job, templates: Mapping[str, str], intent: Intent = NO_INTENT) -> dict[str, str]:
    """Return the text of each file by its name below the run's folder.

    Raises RecipeError where a template fails or what came out breaks a rule.
    """
    return {JOB_FILE: job.to_json(), **_render_cluster(job, templates, intent)}


def _render_cluster(job: Job, templates: Mapping[str, str], intent: Intent) -> dict[str, str]:
    # Each kind is imported when it is asked for, which halves the launcher's start-up.
    if isinstance(job.cluster, SlurmCluster):
        from launcher.clusters.slurm import render_slurm

        return render_slurm(job, templates, intent)
    if isinstance(job.cluster, K8sCluster):
        from launcher.clusters.k8s.manifest import render_k8s

        return render_k8s(job, templates, intent)
    from launcher.clusters.local import render_local

    return render_local(job, templates, intent)

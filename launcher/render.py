"""Render a job into the files that its cluster runs, by cluster kind.

A pure function of the job and the templates' texts: the same inputs give the
same bytes, and no cluster, network or folder is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.clusters.agent import NO_INTENT, Intent
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.cluster import K8sCluster, SlurmCluster
from launcher.rundir import JOB_FILE
from launcher.secrets import FORM


def render(job: Job, templates: Mapping[str, str], intent: Intent = NO_INTENT) -> dict[str, str]:
    """Return the text of each file by its name below the run's folder.

    Raises RecipeError where a template fails or what came out breaks a rule.
    """
    # Each kind is imported when it is asked for, which halves the launcher's start-up.
    if isinstance(job.cluster, SlurmCluster):
        from launcher.clusters.slurm import render_slurm as render_kind
    elif isinstance(job.cluster, K8sCluster):
        from launcher.clusters.k8s.manifest import render_k8s as render_kind
    else:
        from launcher.clusters.local import render_local as render_kind
    files = {JOB_FILE: job.to_json(), **render_kind(job, templates, intent)}
    if name := next((name for name, text in files.items() if FORM.search(text)), None):
        allowed = "allowed: a reference under cluster.secrets"
        raise RecipeError(f"{name} would hold a secret of a template's (not shown); {allowed}")
    return files

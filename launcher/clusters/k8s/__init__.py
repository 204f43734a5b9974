"""Kubernetes: a manifest of a job, its check, and its submission.

The shape of a manifest is in templates/k8s/*.j2; here is what goes into it,
and what has to hold for whatever came out, a team's own templates included.
"""

from __future__ import annotations

from launcher.clusters.k8s.check import check_manifest
from launcher.clusters.k8s.manifest import MANIFEST, render_k8s

__all__ = ["MANIFEST", "check_manifest", "render_k8s"]

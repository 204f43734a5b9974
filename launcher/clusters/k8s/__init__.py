"""Kubernetes: a manifest of a job, its check, and its submission.

The shape of a manifest is in templates/k8s/*.j2; here is what goes into it,
and what has to hold for whatever came out, a team's own templates included.
"""

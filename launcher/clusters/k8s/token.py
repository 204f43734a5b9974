"""The run's token in the cluster: a Secret that a submission makes, and all pods wait for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from launcher.clusters.token import own_token_file, token_secret_name
from launcher.job import Job

SECRET_PATH = "/etc/training-token"
TOKEN_MODE = 0o440
"""Kubernetes gives the file to root and the fs_group."""
SECRET_KEY = "token"


def token_path(job: Job) -> str:
    """Return the file in the pod that holds the token."""
    return own_token_file(job) or f"{SECRET_PATH}/{SECRET_KEY}"


def token_values(job: Job) -> dict[str, Any] | None:
    """Return what the templates need to mount the token, None where they mount none."""
    name = token_secret_name(job)
    return {"name": name, "mount_path": SECRET_PATH, "mode": TOKEN_MODE} if name else None


def token_secret(job: Job, owner: Mapping[str, str]) -> dict[str, Any]:
    """Return a Secret with a new token.

    It belongs to `owner` (apiVersion, kind, name, uid), and is removed with it.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": token_secret_name(job),
            "namespace": job.k8s.namespace,
            "ownerReferences": [dict(owner)],
        },
        "stringData": {SECRET_KEY: secrets.token_hex(32)},
    }

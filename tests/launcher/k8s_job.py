"""Jobs for Kubernetes with some fields changed, and their manifests as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.clusters.k8s.check import read_documents
from launcher.clusters.k8s.manifest import MANIFEST, render_k8s
from launcher.clusters.k8s.objects import JOBS
from launcher.job import Job
from tests.launcher.shipped import TEMPLATES, changed_job, shipped_job, untiered_job

KINDS = ("hyperpod", "job", "trainjob")
TINY = "llama/llama3_tiny_pretrain"
LARGE = "llama/llama3_70b_pretrain"


def k8s_job(kind: str, changes: Mapping[str, Any] | None = None, recipe: str = TINY) -> Job:
    """Return a recipe's job with `changes`, whose keys are dotted paths."""
    made = untiered_job if recipe == TINY else shipped_job
    return changed_job(made(recipe, kind), changes or {})


def manifest(job: Job) -> str:
    return render_k8s(job, TEMPLATES)[MANIFEST]


def documents(job: Job) -> dict[str, Any]:
    """Return the documents of a job's manifest by kind, the job itself as `job` too."""
    found = {document["kind"]: document for document in read_documents(manifest(job))}
    (job,) = (each for kind, each in found.items() if kind in JOBS)
    return {**found, "job": job}


def pod(job: Job) -> dict[str, Any]:
    """Return the pod template of a job's manifest."""
    return template_of(documents(job))


def template_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template of documents by kind: the job's, or that of a TrainJob's runtime."""
    return pod_of(found.get("TrainingRuntime", found["job"]))


def pod_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod template of a job as it is in a manifest."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    return spec.get("template") or spec["replicaSpecs"][0]["template"]


def at(node: Any, path: str) -> Any:
    """Return what lies at a path of keys and indexes, None where nothing does."""
    for key in path.split():
        if isinstance(node, list):
            node = node[int(key)]
        elif node is not None:
            node = node.get(key)
    return node

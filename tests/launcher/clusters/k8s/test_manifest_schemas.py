"""Kubernetes' own schemas, strictly, for every document that we render."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest

from launcher.clusters.k8s.check import read_documents
from launcher.clusters.k8s.growth import growth_job
from launcher.clusters.k8s.manifest import GROWTH
from launcher.job import Job
from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.k8s_job import KINDS, documents, template_of
from tests.launcher.shipped import RECIPES, rendered, shipped_job, untiered_job

# The oldest version of which the package has schemas, and a recent one.
VERSIONS = ("1.25", "1.33")
# From this one a container may begin before the others and end after them, and a job may say how
# often a pod of each index may fail.
SIDECARS_FROM = "1.29"
JOBS = {
    **{
        f"{recipe}-{kind}": (lambda recipe=recipe, kind=kind: shipped_job(recipe, kind))
        for recipe in RECIPES
        for kind in KINDS
    },
    **{f"full-{kind}": (lambda kind=kind: full_job(kind)) for kind in KINDS},
}


def validate(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", JOBS)
def test_documents_fit_the_schemas(name: str) -> None:
    found = documents(JOBS[name]())
    template = template_of(found)
    of_pods = SIDECARS_FROM if template["spec"].get("initContainers") else VERSIONS[0]
    of_jobs = SIDECARS_FROM if "podReplacementPolicy" in found["job"]["spec"] else of_pods
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    for version in VERSIONS:
        for kind in found.keys() & {"ConfigMap", "Service", "Job"}:
            validate(found[kind], max(version, of_jobs))
        validate(pods, max(version, of_pods))


@pytest.mark.parametrize("make", [shipped_job, untiered_job])
def test_jobs_of_an_elastic_run_fit_the_schemas(make: Callable[..., Job]) -> None:
    own = ["resilience.elastic.may_lose_steps=true", "cluster.growth_priority_class=low"]
    job = make("llama/llama3_tiny_elastic", "job", own)
    base, (first, second) = documents(job)["Job"], read_documents(rendered(job)[GROWTH])
    for document in (base, first, second, growth_job(base, 3, "1-2", priority_class="low")):
        for version in (SIDECARS_FROM, VERSIONS[-1]):
            validate(document, version)

"""AWS's own model of a HyperPodPyTorchJob takes what we render, and judges at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launcher.clusters.k8s.schema import FOLDER
from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.clusters.k8s.published import AWS_PYTHON, ask_aws, of_aws, text_of
from tests.launcher.k8s_job import at, documents, k8s_job
from tests.launcher.shipped import RECIPES, shipped_job

pytestmark = pytest.mark.skipif(
    not AWS_PYTHON.exists(), reason=f"no {AWS_PYTHON}; scripts/install-aws-model.sh makes it"
)


# Kubernetes has these fields in a pod. The model confuses classes of one name: a term between
# pods with one of nodes, and the security context of a pod with that of a container.
NOT_IN_THE_MODEL: dict[str, tuple[str, dict[str, Any]]] = {
    "podAffinityTerm": ("affinity podAffinity", {"cluster.affinity.same_topology": "layer"}),
    "fsGroup": ("securityContext fsGroup", {}),
    "fsGroupChangePolicy": ("securityContext fsGroupChangePolicy", {}),
}


def _without(document: dict[str, Any], *paths: str) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    for path in paths:
        *parents, last = path.split()
        node = at(changed, " ".join(("spec replicaSpecs 0 template spec", *parents))) or {}
        node.pop(last, None)
    return changed


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What one process says, whose import takes seconds: verdicts by name, and the schema."""
    jobs = {recipe: documents(shipped_job(recipe, "hyperpod"))["job"] for recipe in RECIPES}
    jobs["full"] = documents(full_job("hyperpod"))["job"]
    jobs = {
        name: _without(job, *(path for path, _ in NOT_IN_THE_MODEL.values()))
        for name, job in jobs.items()
    }
    for name, (_, changes) in NOT_IN_THE_MODEL.items():
        jobs[name] = documents(k8s_job("hyperpod", changes))["job"]
    found = ask_aws([*jobs.values()])
    return {**found, "verdicts": dict(zip(jobs, found["verdicts"], strict=True))}


def test_shipped_schema_is_that_of_the_model(answer: dict[str, Any]) -> None:
    assert (FOLDER / "hyperpod.json").read_text() == text_of(of_aws(answer["schema"]))


@pytest.mark.parametrize("name", [*RECIPES, "full"])
def test_model_takes_the_manifest(answer: dict[str, Any], name: str) -> None:
    assert answer["verdicts"][name] is None


@pytest.mark.parametrize("name", NOT_IN_THE_MODEL)
def test_model_still_lacks_a_field_of_kubernetes(answer: dict[str, Any], name: str) -> None:
    """Once it has it, the full job needs no exception above."""
    assert name in (answer["verdicts"][name] or "")

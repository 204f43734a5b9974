"""Every shipped recipe, and every kind of cluster it is rendered for."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.composition.choice import list_recipes
from launcher.composition.compose import resolve
from launcher.job import Job
from launcher.paths import shipped_folder
from launcher.render import render
from launcher.templates import read_templates

RECIPES = tuple(list_recipes([shipped_folder() / "recipes"]))
CLUSTERS = {
    "local": ("cluster=local",),
    "slurm": ("cluster=slurm",),
    "hyperpod": ("cluster=k8s", "cluster.job_kind=hyperpod"),
    "job": ("cluster=k8s", "cluster.job_kind=job"),
    "trainjob": ("cluster=k8s", "cluster.job_kind=trainjob"),
}
TRAINED = tuple(name for name in RECIPES if not name.startswith("script/"))
"""Those that a trainer of ours trains."""
# What a recipe of a real size leaves to the cluster's profile, or to whoever runs it.
STORE = ("cluster.checkpoint_store_url=s3://example-bucket/runs",)
ASKED_FOR = {name: STORE for name in RECIPES if any(size in name for size in ("120b", "70b", "8b"))}
TEMPLATES = {
    name: text
    for kind in ("local", "slurm", "k8s")
    for name, text in read_templates([shipped_folder() / "templates"], kind).items()
}


def shipped_job(recipe: str, cluster: str, overrides: Sequence[str] = ()) -> Job:
    """Return a recipe's job, composed once for all tests that ask for the same."""
    return _composed(recipe, cluster, tuple(overrides))


@functools.cache
def _composed(recipe: str, cluster: str, overrides: tuple[str, ...]) -> Job:
    asked_for = ASKED_FOR.get(recipe, ())
    return resolve(recipe, [*CLUSTERS[cluster], *asked_for, *overrides], shipped_folder())


def untiered_job(recipe: str, cluster: str, overrides: Sequence[str] = ()) -> Job:
    """Return the job of a recipe without what every recipe gets that chooses no tiers."""
    chosen = any(each.replace("/", ".").startswith("resilience.tiered") for each in overrides)
    own = () if chosen else ("resilience.tiered=null",)
    return shipped_job(recipe, cluster, [*own, *overrides])


def with_values(job: Job, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's content with other values, each under its dotted key."""
    content = job.model_dump(mode="json", by_alias=True)
    for path, value in values.items():
        *parents, last = path.split(".")
        functools.reduce(lambda node, key: node[key], parents, content)[last] = value
    return content


def changed_job(job: Job, values: Mapping[str, Any]) -> Job:
    """Return a job with other values, each under its dotted key."""
    return Job.model_validate_json(json.dumps(with_values(job, values)), strict=True)


def rendered(job: Job) -> dict[str, str]:
    return render(job, TEMPLATES)

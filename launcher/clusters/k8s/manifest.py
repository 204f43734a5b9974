"""Render a job into one manifest: a ConfigMap with the job, and the job's own kind.

Pure: the same job and templates give the same bytes. What came out is checked
before anybody gets it, since a team's own template may stand in for ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from launcher.clusters.agent import NO_INTENT, Intent, agent_config, run_config
from launcher.clusters.k8s.check import SHORT_BOOLEANS, check_documents, check_manifest, indexed_job
from launcher.clusters.k8s.growth import OWNER_UID, growth_job, growth_range
from launcher.clusters.k8s.sidecar import sidecar_config, sidecar_peers
from launcher.clusters.k8s.values import manifest_values
from launcher.job import Job
from launcher.rundir import JOB_FILE, NODE_FILE
from launcher.templates import fill_template
from resilience.node_config import NodeConfig

MANIFEST = "manifest.yaml"
GROWTH = "growth.yaml"
"""Has the Jobs of an elastic run's further nodes, where it starts with such."""

_YAML_WIDTH = 1000

# Pods start minutes apart when nodes are added or an image is large.
_JOIN_DEADLINE_S = 1800.0

# A literal block holds these lines as they are. It begins unindented, since YAML takes the
# indentation from the first line, and ends with one line break.
_PLAIN_TEXT = re.compile(r"[!-~][\t -~]*\n([\t -~]*\n)*(?<!\n\n)")


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes what kubectl would read as true or false."""


_Dumper.add_implicit_resolver(*SHORT_BOOLEANS)


def render_k8s(
    job: Job, templates: Mapping[str, str], intent: Intent = NO_INTENT
) -> dict[str, str]:
    """Return the manifest of a job under the name it is written by, and what comes with it.

    Raises RecipeError where a template fails, or what came out breaks a rule.
    """
    cluster = job.k8s
    values = manifest_values(job, cluster)
    agent = agent_config(job, join_deadline_s=_JOIN_DEADLINE_S)
    config = NodeConfig(run=run_config(job, intent), agent=agent, memoryd=sidecar_config(job))
    texts = {JOB_FILE: job.to_json(), NODE_FILE: config.to_json()}
    if cluster.pre_script is not None:
        texts["pre.sh"] = cluster.pre_script
    texts["start.sh"] = fill_template(templates, "k8s/start.sh.j2", values)
    if peers := sidecar_peers(job, cluster):
        texts["memoryd.sh"] = fill_template(templates, "k8s/memoryd.sh.j2", values)
        texts["memoryd.peers"] = peers
    values["files"] = [_file(*item) for item in texts.items()]
    manifest = fill_template(templates, f"k8s/{cluster.job_kind}.yaml.j2", values)
    documents = check_manifest(manifest)
    if not (jobs := _growth_jobs(job, documents)):
        return {MANIFEST: manifest}
    own = {"growth_jobs": jobs, "owner_uid": OWNER_UID}
    growth = fill_template(templates, "k8s/growth.yaml.j2", {**values, **own})
    check_documents(growth, "further Jobs")
    return {MANIFEST: manifest, GROWTH: growth}


def _growth_jobs(job: Job, documents: Sequence[dict[str, Any]]) -> list[str]:
    """Return the Jobs of the nodes that start beyond the fewest."""
    further = [index for index in growth_range(job) if index < job.num_nodes_started]
    if not further:
        return []
    base, own_class = indexed_job(documents), job.k8s.growth_priority_class
    jobs = [growth_job(base, each, OWNER_UID, priority_class=own_class) for each in further]
    return [yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=_YAML_WIDTH) for each in jobs]


def _file(name: str, text: str) -> dict[str, object]:
    is_plain = _PLAIN_TEXT.fullmatch(text)
    return {"name": name, "text": text, "lines": text.splitlines() if is_plain else None}

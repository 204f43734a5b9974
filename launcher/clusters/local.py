"""This machine as a cluster: a script a node, each run as a process group of its own.

Rendering is pure and its text names no folder of this machine: a script finds
its job and its run's folder beside itself. `local_run` executes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from launcher.clusters.agent import NodeWords, agent_command
from launcher.clusters.local_files import node_name, script_name
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.templates import fill_template

TEMPLATE = "local/node.sh.j2"


def render_local(job: Job, templates: Mapping[str, str]) -> dict[str, str]:
    """Return the script of each node by its file name.

    Raises RecipeError where the template fails.
    """
    return {
        script_name(node_name(index)): fill_template(templates, TEMPLATE, _values(job, index))
        for index in range(job.num_nodes_started)
    }


def _values(job: Job, index: int) -> dict[str, object]:
    secrets = job.cluster.secrets if isinstance(job.cluster, LocalCluster) else {}
    node = node_name(index)
    return {
        "recipe": job.recipe,
        "digest": job.digest(),
        "node": node,
        "num_nodes": job.num_nodes_started,
        "secrets": sorted(secrets.items()),
        "has_file_secrets": any(secret.file for secret in secrets.values()),
        "has_exported_secrets": not all(secret.file for secret in secrets.values()),
        "env": sorted(_environment(job).items()),
        "agent_words": agent_command(job, _words(job, node)),
    }


def _environment(job: Job) -> dict[str, str]:
    """Return the variables that the workers get; the recipe's win over ours."""
    ours = {"OMP_NUM_THREADS": str(job.trainer.threads_per_worker)}
    if job.instance.accelerator == "cpu":
        # A node's own name may resolve to an address that its workers cannot reach.
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    return {**ours, **job.env}


def _words(job: Job, node: str) -> NodeWords:
    return NodeWords(
        python='"${LAUNCHER_PYTHON:-python}"',
        rdzv_endpoint='"${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500}"',
        rdzv_id=f'{shlex.quote(job.name)}-"${{LAUNCHER_RUN_ID:-0}}"',
        job_path='"$run_dir/job.json"',
        run_path='"$run_dir"',
        node=shlex.quote(node),
        local_addr="127.0.0.1",
    )

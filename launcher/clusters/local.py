"""This machine as a cluster: a script a node, each run as a process group of its own.

Rendering is pure and its text names no folder of this machine: a script finds
its job and its run's folder beside itself. `local_run` executes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from launcher.clusters.agent import NodeWords, agent_command
from launcher.clusters.local_files import node_name, script_name
from launcher.clusters.memoryd import (
    PEER_PORT,
    MemorydWords,
    memoryd_command,
    memoryd_settings,
    wait_command,
)
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.support import notes
from launcher.templates import fill_template

TEMPLATE = "local/node.sh.j2"
_PYTHON = '"${LAUNCHER_PYTHON:-python}"'
# A node that is asked to end has 15 s (local_run), and its arena stays.
_DRAIN_S = 5


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
        "notes": notes(job),
        "secrets": sorted(secrets.items()),
        "has_file_secrets": any(secret.file for secret in secrets.values()),
        "has_exported_secrets": not all(secret.file for secret in secrets.values()),
        "env": sorted(_environment(job).items()),
        "agent_words": agent_command(job, _words(job, node)),
        "memoryd": _memoryd_values(job, index),
    }


def num_peer_ports(job: Job) -> int:
    """Return how many ports the nodes' checkpoint daemons want chosen for them."""
    settings = memoryd_settings(job)
    is_open = settings is not None and settings.peer_port is None
    return job.num_nodes_started if is_open and job.num_nodes_started > 1 else 0


def _memoryd_values(job: Job, index: int) -> dict[str, object] | None:
    settings = memoryd_settings(job)
    if settings is None:
        return None
    nodes = range(job.num_nodes_started)
    words = MemorydWords(
        python=_PYTHON,
        folder='"$MEMORYD_DIR"',
        node=node_name(index),
        token_file='"$MEMORYD_TOKEN_FILE"',
        peer_listen=f'127.0.0.1:"${{peer_ports[{index}]}}"',
        peers=tuple(
            f'--peer={node_name(each)}=127.0.0.1:"${{peer_ports[{each}]}}"'
            for each in nodes
            if each != index
        ),
        drain_s=_DRAIN_S,
    )
    first = settings.peer_port or PEER_PORT
    return {
        "token_file": settings.token_file,
        "ports": [first + each for each in nodes] if len(nodes) > 1 else [],
        "python": _PYTHON,
        "words": memoryd_command(job, settings, words),
        "wait_words": wait_command(_PYTHON),
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
        python=_PYTHON,
        rdzv_endpoint='"${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500}"',
        rdzv_id=f'{shlex.quote(job.name)}-"${{LAUNCHER_RUN_ID:-0}}"',
        job_path='"$run_dir/job.json"',
        run_path='"$run_dir"',
        node=shlex.quote(node),
        local_addr="127.0.0.1",
    )

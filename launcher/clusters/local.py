"""This machine as a cluster: a script a node, each run as a process group of its own.

Rendering is pure and its text names no folder of this machine: a script finds
its job and its run's folder beside itself. `local_run` executes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from launcher.clusters.agent import NO_INTENT, Intent, agent_command, agent_config, run_config
from launcher.clusters.local_files import node_name, script_name
from launcher.clusters.memoryd import memoryd_config
from launcher.clusters.token import own_token_file
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.job.environment import worker_environment
from launcher.job.tiered_rules import PEER_PORT
from launcher.rundir import NODE_FILE
from launcher.support import notes
from launcher.templates import fill_template
from resilience.node_config import NodeConfig

TEMPLATE = "local/node.sh.j2"
_PYTHON = '"${LAUNCHER_PYTHON:-python}"'
# A node that is asked to end has 15 s (local_run), and its arena stays.
_DRAIN_S = 5
_FIRST_PORT = 29500


def render_local(
    job: Job, templates: Mapping[str, str], intent: Intent = NO_INTENT
) -> dict[str, str]:
    """Return the script of each node by its file name, and the one file for all of them.

    Raises RecipeError where the template fails.
    """
    scripts = {
        script_name(node_name(index)): fill_template(templates, TEMPLATE, _values(job, index))
        for index in range(job.num_nodes_max)
    }
    config = NodeConfig(
        run=run_config(job, intent),
        agent=agent_config(job),
        memoryd=memoryd_config(job, drain_s=_DRAIN_S),
    )
    return {NODE_FILE: config.to_json(), **scripts}


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
        "env": sorted(worker_environment(job).items()),
        "agent_words": _agent_words(job, index),
        "token_file": own_token_file(job),
        "memoryd": _memoryd_values(job),
    }


def num_peer_ports(job: Job) -> int:
    """Return how many ports the nodes' checkpoint daemons want chosen for them."""
    is_open = job.memoryd is not None and job.memoryd.peer_port is None
    return job.num_nodes_max if is_open and job.num_nodes_max > 1 else 0


def _memoryd_values(job: Job) -> dict[str, object] | None:
    if job.memoryd is None:
        return None
    nodes = range(job.num_nodes_max)
    first = job.memoryd.peer_port or PEER_PORT
    return {"ports": [first + each for each in nodes] if len(nodes) > 1 else []}


def _memoryd_words(job: Job, index: int) -> tuple[str, ...]:
    """Return where the node's daemon listens, and where the others' do."""
    nodes = range(job.num_nodes_max)
    if job.memoryd is None or len(nodes) == 1:
        return ()
    return (
        f'--peer-listen=127.0.0.1:"${{peer_ports[{index}]}}"',
        *(
            f'--peer={node_name(each)}=127.0.0.1:"${{peer_ports[{each}]}}"'
            for each in nodes
            if each != index
        ),
    )


def endpoints(ports: Iterable[int]) -> str:
    """Return where the agents of the nodes find each other."""
    return ",".join(f"127.0.0.1:{port}" for port in ports)


def _agent_words(job: Job, index: int) -> tuple[str, ...]:
    by_hand = range(_FIRST_PORT, _FIRST_PORT + job.num_nodes_max)
    return agent_command(
        job,
        python=_PYTHON,
        rdzv_endpoint=f'"${{LAUNCHER_RDZV_ENDPOINT:-{endpoints(by_hand)}}}"',
        rdzv_id=f'{shlex.quote(job.name)}-"${{LAUNCHER_RUN_ID:-0}}"',
        node=node_name(index),
        token_file='"$token_file"',
        local_addr="127.0.0.1",
        memoryd=_memoryd_words(job, index),
    )

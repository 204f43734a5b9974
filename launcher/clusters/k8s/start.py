"""The script that starts a pod's workers, and the words of its agent.

The script lies in the ConfigMap beside job.json, so Kubernetes expands no
$(VARIABLE) in it; the words are quoted for the shell here.
"""

from __future__ import annotations

import shlex

from launcher.clusters.agent import agent_command
from launcher.clusters.k8s.token import token_path
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.cluster_rules import pods_name
from launcher.job.tiered_rules import OPERATOR_PORT, PEER_PORT
from launcher.rundir import JOB_FILE, NODE_FILE
from resilience.settings import TieredSettings

CONFIG_PATH = "/etc/training"
"""Where the ConfigMap is mounted in the pod."""


POD_NAME = "LAUNCHER_POD_NAME"
POD_IP = "LAUNCHER_POD_IP"
K8S_NODE = "LAUNCHER_K8S_NODE"
"""Variable with the name of the pod's node, which is what fails together."""
JOB_UID = "LAUNCHER_JOB_UID"
"""Variable with the Job's uid: another Job of the same name is another run."""


_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")


def run_path(job: Job, cluster: K8sCluster) -> str:
    """Return the run's own folder in the pod: a team's jobs may share one claim."""
    return f"{cluster.run_path}/{job.name}"


def start_command(job: Job, cluster: K8sCluster) -> tuple[str, ...]:
    """Return the words of the shell that start a pod's agent."""
    node = f'{shlex.quote(pods_name(job, cluster))}-"$JOB_COMPLETION_INDEX"'
    run, endpoint = f'{shlex.quote(job.name)}-"${JOB_UID}"', '"$rdzv_endpoint"'
    options, daemon = _node_options(job), tuple[str, ...]()
    if cluster.job_kind == "hyperpod":
        options, endpoint = _operator_options(job, cluster), ""
        run = f'{shlex.quote(job.name)}-"$submission"'
        # A daemon has its node's name, and of the others the operator tells the address alone.
        node = f'"${POD_IP if job.memoryd else POD_NAME}"'
        daemon = (f'--domain="${K8S_NODE}"',) if job.memoryd else ()
    if cluster.job_kind == "trainjob":
        options += (f"--progress-steps={job.trainer.max_steps or 0}",)
    return agent_command(
        job,
        python=shlex.quote(cluster.python or "python"),
        config_path=f"{CONFIG_PATH}/{NODE_FILE}",
        rdzv_endpoint=endpoint,
        rdzv_id=run,
        token_file=shlex.quote(token_path(job)),
        job_path=f"{CONFIG_PATH}/{JOB_FILE}",
        run_path=shlex.quote(run_path(job, cluster)),
        node=node,
        local_addr=f'"${POD_IP}"',
        node_options=options,
        memoryd=daemon,
    )


def _operator_options(job: Job, cluster: K8sCluster) -> tuple[str, ...]:
    """Return by whom the agent lets itself be started and stopped."""
    words = [f"--operator-port={OPERATOR_PORT}"]
    words += [f"--operator-from={each}" for each in cluster.operator_from or _PRIVATE]
    if job.memoryd and job.num_nodes_max > 1 and not job.resizes_by_restart:
        words.append(f"--operator-peer-port={peer_port(job.memoryd)}")
    return tuple(words)


def peer_port(settings: TieredSettings) -> int:
    """Return where the checkpoint daemon of a pod is found by the others."""
    return settings.peer_port or PEER_PORT


def _node_options(job: Job) -> tuple[str, ...]:
    """Return what is said of a node: a pod of a run of one size is made again under its index."""
    if job.resilience.elastic:
        return ("${further:+--further-node}",)
    return ("--awaits-nodes",) if job.resilience.checkpointless else ()

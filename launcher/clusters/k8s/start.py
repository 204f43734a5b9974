"""The script that starts a pod's workers, and the words of hyperpodrun.

The script lies in the ConfigMap beside job.json, so Kubernetes expands no
$(VARIABLE) in it; the words are quoted for the shell here.
"""

from __future__ import annotations

import shlex
from typing import Any

from launcher.clusters.agent import agent_command
from launcher.clusters.k8s.token import token_path
from launcher.clusters.program import script_words
from launcher.job import Job
from launcher.job.cluster import RENDEZVOUS_PORT, K8sCluster
from launcher.job.cluster_rules import num_base_pods
from launcher.job.workload import ScriptTrainer
from launcher.rundir import JOB_FILE, NODE_FILE

CONFIG_PATH = "/etc/training"
"""Where the ConfigMap is mounted in the pod."""

SERVER_PORT = 8080
"""Where HyperPod's operator reaches hyperpodrun."""

POD_NAME = "LAUNCHER_POD_NAME"
POD_IP = "LAUNCHER_POD_IP"
JOB_UID = "LAUNCHER_JOB_UID"
"""Variable with the Job's uid: another Job of the same name is another run."""

# HyperPod's log monitoring reads standard output there.
_LOG_PATH = "/tmp/hyperpod"


def rendezvous_port(cluster: K8sCluster) -> int:
    """Return the port at which each pod of a plain Job is found by the others."""
    return cluster.rdzv_port or RENDEZVOUS_PORT


def run_path(job: Job, cluster: K8sCluster) -> str:
    """Return the run's own folder in the pod: a team's jobs may share one claim."""
    return f"{cluster.run_path}/{job.name}"


def start_values(job: Job, cluster: K8sCluster) -> dict[str, Any]:
    """Return what the template of start.sh is filled with."""
    is_hyperpod = cluster.job_kind == "hyperpod"
    command = hyperpod_command(job, cluster) if is_hyperpod else _job_command(job, cluster)
    return {
        "job": job,
        "cluster": cluster,
        "config_path": CONFIG_PATH,
        "has_pre_script": cluster.pre_script is not None,
        "rendezvous_port": rendezvous_port(cluster),
        "num_base_pods": num_base_pods(job, cluster),
        "command": command,
    }


def hyperpod_command(job: Job, cluster: K8sCluster) -> tuple[str, ...]:
    """Return the shell words that start hyperpodrun on one node.

    The operator gives each node its rank and the rendezvous, and counts
    restarts; of torchrun's own words only sizes and logs are left.
    """
    if isinstance(job.trainer, ScriptTrainer):
        # Without our agent nothing gives it its folder; `support` refuses to start it.
        program = script_words(job.trainer, "python")
    else:
        program = (
            "-m",
            "recipes_training",
            f"--job={CONFIG_PATH}/{JOB_FILE}",
            f"--run-dir={shlex.quote(run_path(job, cluster))}",
            f'--node-name="${POD_NAME}"',
        )
    return (
        "hyperpodrun",
        '--nnodes="$NNODES"',
        f"--nproc-per-node={job.trainer.workers_per_node}",
        f"--server-port={SERVER_PORT}",
        "--server-log-level=warning",
        "--tee=3",
        f"--log-dir={_LOG_PATH}",
        *program,
    )


def _job_command(job: Job, cluster: K8sCluster) -> tuple[str, ...]:
    return agent_command(
        job,
        python=shlex.quote(cluster.python or "python"),
        config_path=f"{CONFIG_PATH}/{NODE_FILE}",
        rdzv_endpoint='"$rdzv_endpoint"',
        rdzv_id=f'{shlex.quote(job.name)}-"${JOB_UID}"',
        token_file=shlex.quote(token_path(job)),
        job_path=f"{CONFIG_PATH}/{JOB_FILE}",
        run_path=shlex.quote(run_path(job, cluster)),
        # The pod's host name, unless it shares the node's.
        node=f'{shlex.quote(job.name)}-"$JOB_COMPLETION_INDEX"',
        local_addr=f'"${POD_IP}"',
        node_options=_node_options(job),
    )


def _node_options(job: Job) -> tuple[str, ...]:
    """Return what is said of a node: a pod of a run of one size is made again under its index."""
    if job.resilience.elastic:
        return ("${further:+--further-node}",)
    return ("--awaits-nodes",) if job.resilience.checkpointless else ()

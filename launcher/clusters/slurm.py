"""Render a job into the script that sbatch takes, and hand it over.

Options stand in #SBATCH lines, which no shell reads: `sbatch_lines` has the
quoting of sbatch's own parser. Everything below them is shell and takes its
values through the filter `sh`. What runs on a node is decided in the template.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Mapping

from launcher.clusters.agent import NO_INTENT, Intent, agent_command, agent_config, run_config
from launcher.clusters.memoryd import memoryd_config
from launcher.clusters.passed import passed_on_node
from launcher.clusters.sbatch_lines import check_option, option_line, parse_option_line
from launcher.clusters.token import own_token_file
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.cluster import SlurmCluster, SlurmContainer
from launcher.job.cluster_rules import requeues_at_limit
from launcher.job.environment import worker_environment
from launcher.job.tiered_memory import shm_mib
from launcher.rundir import NODE_FILE
from launcher.support import notes
from launcher.templates import fill_template
from resilience.node_config import NodeConfig

JOB_SCRIPT = "job.sbatch"
TEMPLATE = "slurm/job.sbatch.j2"

# Slurm keeps the warning time of --signal in 16 bits.
_SIGNAL_BEFORE_END_S_MAX = 65535
# So much before that time Slurm may send it, as its manual says.
_SIGNAL_EARLY_S_MAX = 60
# Open files of a worker: its own and those of the libraries, and a few connections to each rank.
_FILES = 1024
_FILES_OF_RANK = 8
# Exit status of a run that was asked to end, by SIGTERM, and has.
_ASKED_STATUS = 143
_GAVE_UP_STATUS = 75
"""Exit status of a run that gave up, for whatever starts jobs again."""
_PEER_WORDS = ('--peer-listen="$peer_listen"', '--peers-file="$peers_file"', '--switch="$switch"')
# Recipe keys whose option has the same name.
_TEXT_FIELDS = ("partition", "account", "qos", "reservation", "constraint", "exclude", "comment")


def render_slurm(
    job: Job, templates: Mapping[str, str], intent: Intent = NO_INTENT
) -> dict[str, str]:
    """Return the batch script and the file for all nodes by their names; job.json lies beside them.

    Pure. No path of this machine is in it: the run's folder is the one that
    sbatch is called in. Raises RecipeError.
    """
    cluster = job.slurm
    if cluster.container:
        _check_mounts(cluster.container)
    environment = worker_environment(job)
    has_efa = environment.get("FI_PROVIDER") == "efa"
    values = {
        "job": job,
        "recipe": job.recipe,
        "digest": job.digest(),
        "notes": notes(job),
        "cluster": cluster,
        "option_lines": _option_lines(job, cluster),
        "env": sorted(environment.items()),
        "has_efa": has_efa,
        "num_efa": job.instance.num_efa,
        "num_files": _FILES + _FILES_OF_RANK * job.num_nodes_max * job.trainer.workers_per_node,
        "num_gpus": job.trainer.num_devices if job.instance.accelerator == "gpu" else 0,
        "passed": passed_on_node(job),
        "secrets": sorted(cluster.secrets.items()),
        "sizes": _node_counts(job),
        "is_checkpointless": job.resilience.checkpointless is not None,
        "gave_up_status": _GAVE_UP_STATUS,
        "elastic": _elastic_values(job),
        "num_standby": job.resilience.standby_nodes,
        "num_cpus": job.resources.num_cpus,
        "agent_words": _agent_words(job, cluster),
        "token_file": own_token_file(job),
        "memoryd": _memoryd_values(job, cluster),
        "shared_host": _shared_host(cluster),
        "shm_mib": shm_mib(job),
        "limit": _limit_values(job, cluster),
    }
    text = fill_template(templates, TEMPLATE, values)
    check_slurm(text)
    config = NodeConfig(
        run=run_config(job, intent), agent=agent_config(job), memoryd=memoryd_config(job)
    )
    return {JOB_SCRIPT: text, NODE_FILE: config.to_json()}


def check_slurm(text: str) -> None:
    """Check that a script says to sbatch what it seems to say. Raises RecipeError.

    sbatch reads options down to the first command and silently ignores those
    below it, where a line break in a value would put them.
    """
    lines = text.split("\n")
    if lines[-1] or not re.fullmatch(r"#!/\S+( \S+)?", lines[0]):
        raise RecipeError(f"{JOB_SCRIPT} needs '#!' in its first line and a newline at its end")
    if "\r" in text:
        raise RecipeError(f"{JOB_SCRIPT} holds a carriage return, which sbatch refuses")
    options: dict[str, int] = {}
    is_header = True
    for number, line in enumerate(lines, start=1):
        if not line.startswith("#SBATCH"):
            is_header = is_header and (not line.strip() or line.startswith("#"))
            continue
        where = f"{JOB_SCRIPT}, line {number}"
        if not is_header:
            raise RecipeError(f"{where}: sbatch ignores {line!r}, which stands after a command")
        name = parse_option_line(line, where)
        if name in options:
            raise RecipeError(f"{where}: --{name} stands in line {options[name]} already")
        options[name] = number
    if "ignore-pbs" not in options:
        raise RecipeError(
            f"{JOB_SCRIPT} needs '#SBATCH --ignore-pbs'; without it sbatch obeys every line "
            "that begins with #PBS or #BSUB, in a pre_script as well"
        )


def _option_lines(job: Job, cluster: SlurmCluster) -> list[str]:
    elastic, resources = job.resilience.elastic, job.resources
    is_gpu = job.instance.accelerator == "gpu"
    low, high = (elastic.nodes_min, elastic.nodes_max) if elastic else (job.num_nodes_started,) * 2
    high += job.resilience.standby_nodes if elastic else 0
    lines = [
        option_line("ignore-pbs"),
        option_line("job-name", job.name),
        option_line("nodes", str(low) if low == high else f"{low}-{high}"),
        # With a range of nodes it makes Slurm give the fewest, so there the step alone says it.
        option_line("ntasks-per-node", "1") if low == high else None,
        option_line("gpus-per-node", str(job.trainer.num_devices)) if is_gpu else None,
        option_line("cpus-per-task", str(resources.num_cpus)) if resources.num_cpus else None,
        option_line("mem", f"{resources.memory_gib}G" if resources.memory_gib else "0"),
        option_line("time", job.time_limit) if job.time_limit else None,
        option_line("exclusive") if cluster.exclusive else None,
        option_line("requeue" if cluster.requeue else "no-requeue"),
        # A node that Slurm loses does not end a job that has another to take its place.
        option_line("no-kill") if _outlives_nodes(job, cluster) else None,
        _signal_line(cluster.signal_before_end_s, to_script=_is_resizable(job)),
        option_line("output", "%x-%j.log"),
        option_line("open-mode", "append"),
    ]
    for field in _TEXT_FIELDS:
        if (value := getattr(cluster, field)) is not None:
            check_option(field, value, f"cluster.{field}")
            lines.append(option_line(field, value))
    for name, value in sorted(cluster.extra_options.items()):
        has_value = check_option(name, value, f"cluster.extra_options.{name}")
        lines.append(option_line(name, value if has_value else None))
    return [line for line in lines if line is not None]


def _outlives_nodes(job: Job, cluster: SlurmCluster) -> bool:
    """Return whether to ask that the job survives a node, unless the recipe asks for it already."""
    can_do_without = bool(job.resilience.standby_nodes) or _is_resizable(job)
    return can_do_without and "no-kill" not in cluster.extra_options


def _is_resizable(job: Job) -> bool:
    """Return whether the run goes on where it gets or loses nodes."""
    return job.resilience.elastic is not None and job.resilience.checkpointless is not None


def _elastic_values(job: Job) -> dict[str, int] | None:
    """Return what the script of a run is told that may change its size."""
    elastic = job.resilience.elastic
    if elastic is None or not _is_resizable(job):
        return None
    nodes_min = elastic.nodes_min
    return {"nodes_min": nodes_min, "founders_min": max(nodes_min, min(2, elastic.nodes_max))}


def _signal_line(seconds: int | None, *, to_script: bool) -> str | None:
    """Return the option that sends SIGTERM to the steps, which are the nodes' agents.

    `to_script`: to the script instead, which asks the agents of other jobs as well.
    """
    if seconds is None:
        return None
    if seconds > _SIGNAL_BEFORE_END_S_MAX:
        raise RecipeError(
            f"cluster.signal_before_end_s {seconds} is more than Slurm can count to; "
            f"allowed: at most {_SIGNAL_BEFORE_END_S_MAX}, or null"
        )
    return option_line("signal", f"{'B:' if to_script else ''}TERM@{seconds}")


def _limit_values(job: Job, cluster: SlurmCluster) -> dict[str, int] | None:
    """Return what tells the end by the time limit from others, None where both end the job."""
    seconds = cluster.signal_before_end_s
    if not requeues_at_limit(job) or seconds is None:
        return None
    return {"asked_status": _ASKED_STATUS, "window_s": seconds + _SIGNAL_EARLY_S_MAX}


def _node_counts(job: Job) -> tuple[int, ...]:
    """Return the numbers of nodes that the run may have, () for any that Slurm gives.

    A run that may change its size has those beyond an allowed number stand by.
    """
    elastic = job.resilience.elastic
    if _is_resizable(job):
        return ()
    if elastic is None:
        return tuple(range(job.trainer.num_nodes, job.num_nodes_started + 1))
    return elastic.sizes if elastic.nodes_allowed or elastic.nodes_step else ()


def _agent_words(job: Job, cluster: SlurmCluster) -> tuple[str, ...]:
    host = _shared_host(cluster)
    state_command = f"{shlex.quote(cluster.python)} -m resilience.agent.slurm_node"
    return agent_command(
        job,
        python=shlex.quote(cluster.python),
        rdzv_endpoint='"$rdzv_endpoint"',
        rdzv_id='"$run_job"' if _is_resizable(job) else '"$SLURM_JOB_ID"',
        rdzv_attempt='"$attempt"',
        node='"$SLURMD_NODENAME"',
        token_file='"$token_file"',
        # Nodes that share a machine have names that do not resolve.
        local_addr=shlex.quote(host) if host else None,
        node_options=_node_options(job),
        nnodes='"$founders"' if _is_resizable(job) else None,
        memoryd=_PEER_WORDS if job.memoryd and job.num_nodes_max > 1 else (),
        node_state_command=shlex.quote(state_command) if job.resilience.checkpointless else None,
    )


def _node_options(job: Job) -> tuple[str, ...]:
    """Return what is said of a node: Slurm ends all nodes of the job, but not added ones."""
    if _is_resizable(job):
        return ("${ends_run:+--ends-run}",)
    return ("--ends-run",) if job.resilience.checkpointless else ()


def _memoryd_values(job: Job, cluster: SlurmCluster) -> dict[str, object] | None:
    if job.memoryd is None:
        return None
    return {
        "peer_port": job.memoryd.peer_port,
        # Nodes that share a machine share its ports as well.
        "host": _shared_host(cluster),
        "has_peers": job.num_nodes_max > 1,
    }


def _shared_host(cluster: SlurmCluster) -> str | None:
    """Return the address at which nodes that share a machine meet, None where they share none."""
    host = cluster.rdzv_host or ""
    try:
        is_shared = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_shared = host == "localhost"
    return host if is_shared else None


def _check_mounts(container: SlurmContainer) -> None:
    for mount in container.mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[^:,]+)?", mount):
            raise RecipeError(
                f"cluster.container.mounts has {mount!r}; allowed: source:destination or "
                "source:destination:flags, without commas"
            )

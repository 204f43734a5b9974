"""What this version cannot run, or would run to nobody's use.

Such a job is noted when it is rendered and in the rendered files, and refused before anything is
started. All but the last function are pure.
"""

from __future__ import annotations

from importlib.util import find_spec

from launcher import VERSION
from launcher.clusters.k8s.security import security_note
from launcher.clusters.k8s.start import run_path
from launcher.clusters.token import token_secret_name
from launcher.errors import OutsideError, RecipeError
from launcher.job import Job
from launcher.job.cluster import HostPath, K8sCluster, PersistentVolumeClaim, SlurmCluster
from launcher.job.cluster_rules import requeues_at_limit
from launcher.job.idle import idle_note
from launcher.job.recovery_rules import shared_fate_note
from launcher.job.tiered_rules import STORE_URL, STORE_URL_FORM
from launcher.job.workload import Jsonl, MegatronTrainer, S3Jsonl, ScriptTrainer

DEFAULT_IMAGE = f"training-recipes:{VERSION}"
"""What `make image` calls the image of this version; no registry has it under this name alone."""


def check_runnable(job: Job, action: str, *, has_default_image: bool = False) -> None:
    """Refuse to start a job that could not train, or whose results would be lost.

    `has_default_image`: nobody named the image. Raises RecipeError that says what to change.
    """
    if problems := _problems(job, has_default_image=has_default_image):
        advice = "\nuse action=render, or change that"
        raise RecipeError("\n".join(f"action {action!r}: {line}" for line in problems) + advice)


def notes(job: Job, *, has_default_image: bool = True) -> list[str]:
    """Return what a person who applies the rendered files by hand has to know, a line each.

    Whatever `check_runnable` refuses is among the lines.
    """
    idle = idle_note(job.training) if job.training else None
    told = [unmounted_inputs(job), awaited_secret(job), idle, shared_fate_note(job)]
    told += [security_note(job), partition_limit(job)]
    if has_default_image:
        told.append(unpublished_image(job))
    return [*refusals(job), *(note for note in told if note)]


def printed_notes(job: Job, action: str, *, has_default_image: bool) -> list[str]:
    """Return the notes that the launcher prints: the Secret's only where it is the next step.

    action=submit makes the Secret itself, and a job that lacks more cannot be applied yet.
    """
    found = notes(job, has_default_image=has_default_image)
    if note := _warm_up_note(job):
        found.append(note)
    if action == "submit" or _problems(job, has_default_image=has_default_image):
        return [note for note in found if note != awaited_secret(job)]
    return found


def _warm_up_note(job: Job) -> str | None:
    """Say that the learning rate never gets to its height: a person may try a few steps."""
    trainer = job.training.trainer if job.training else None
    if trainer is None or trainer.optimizer.warmup_steps < trainer.max_steps:
        return None
    return (
        f"trainer.optimizer.warmup_steps {trainer.optimizer.warmup_steps} is not less than "
        f"trainer.max_steps {trainer.max_steps}, so the learning rate never reaches "
        f"trainer.optimizer.lr {trainer.optimizer.lr:g}"
    )


def _problems(job: Job, *, has_default_image: bool) -> list[str]:
    image = unpublished_image(job) if has_default_image else None
    return [*refusals(job), *([image] if image else [])]


def refusals(job: Job) -> list[str]:
    """Return why a job is not started, a line for each reason; none for one that runs."""
    found = [
        _no_runtime(job),
        missing_store(job),
        lost_results(job),
        lost_checkpoints(job),
        folder_of_each_node(job),
        folder_of_program(job),
    ]
    return [reason for reason in found if reason]


def _no_runtime(job: Job) -> str | None:
    """Say what of a job is rendered, but has nothing here that would run it."""
    missing = _missing_of_megatron(job)
    is_lone = job.resilience.elastic and job.resilience.checkpointless is None
    if is_lone and not is_hyperpod(job):
        missing.append(
            "resilience.elastic without resilience.checkpointless (it runs with "
            "resilience/checkpointless=default)"
        )
    return f"this version renders, but cannot run, {' and '.join(missing)}" if missing else None


def _missing_of_megatron(job: Job) -> list[str]:
    if not isinstance(trainer := job.trainer, MegatronTrainer):
        return []
    missing = []
    if trainer.context_parallel > 1:
        # Megatron's attention without Transformer Engine knows none.
        missing.append(f"trainer.context_parallel {trainer.context_parallel} (it runs: 1)")
    if trainer.virtual_pipeline:
        missing.append(f"trainer.virtual_pipeline {trainer.virtual_pipeline} (it runs: null)")
    return missing


def unpublished_image(job: Job) -> str | None:
    """Say that a job's image is one that each team builds for itself, None where it is not."""
    if not isinstance(cluster := job.cluster, K8sCluster) or cluster.image != DEFAULT_IMAGE:
        return None
    words = "make image ACCELERATOR=cuda" if job.instance.accelerator == "gpu" else "make image"
    return (
        f"cluster.image {cluster.image!r} is published nowhere: build it with `{words}`, push it "
        "to where your cluster pulls from, and set cluster.image to its name there"
    )


def awaited_secret(job: Job) -> str | None:
    """Say which Secret action=submit makes, and a person who applies the manifest has to make."""
    name = token_secret_name(job)
    if name is None or not isinstance(cluster := job.cluster, K8sCluster):
        return None
    return (
        f"the pods wait for the Secret {name!r} with the token of the run, which action=submit "
        "makes; before you apply the manifest by hand, make it with\n"
        f"  openssl rand -hex 32 | kubectl -n {cluster.namespace} create secret generic {name} "
        "--from-file=token=/dev/stdin"
    )


def is_hyperpod(job: Job) -> bool:
    """Return whether HyperPod's operator starts the run."""
    return isinstance(job.cluster, K8sCluster) and job.cluster.job_kind == "hyperpod"


def lost_results(job: Job) -> str | None:
    """Say where a Kubernetes job's checkpoint would be lost with its pods, None where not."""
    if not isinstance(cluster := job.cluster, K8sCluster):
        return None
    if (mount := cluster.mount_of(cluster.run_path)) and not mount.read_only:
        return None
    return (
        f"cluster.run_path {cluster.run_path!r} is on no volume, so events and checkpoint would "
        "be lost with the pods; mount one with cluster.volume_claims, and set cluster.run_path "
        "below its mount_path"
    )


def missing_store(job: Job) -> str | None:
    """Say that nobody has named the store of a job's checkpoints, None where somebody has."""
    tiered = job.resilience.tiered
    if not tiered or not tiered.store or tiered.store.url:
        return None
    return (
        f"{STORE_URL} null, where the checkpoints of this job go; set {STORE_URL}={STORE_URL_FORM} "
        "or folder:/PATH that every node has, or cluster.checkpoint_store_url in the cluster's "
        "profile; resilience/tiered=ram needs none"
    )


def lost_checkpoints(job: Job) -> str | None:
    """Say where a Kubernetes job's store is a folder that goes with its pods, None where not."""
    tiered = job.resilience.tiered
    if not isinstance(cluster := job.cluster, K8sCluster) or not tiered or not tiered.store:
        return None
    kind, _, path = (tiered.store.url or "").partition(":")
    if tiered.store.is_in_run:
        path = f"{run_path(job, cluster)}/{path}"
    mount = cluster.mount_of(path) if kind == "folder" else None
    if kind != "folder" or (isinstance(mount, PersistentVolumeClaim) and not mount.read_only):
        return None
    return (
        f"resilience.tiered.store.url {tiered.store.url!r} is on no claim that all pods write to, "
        "so checkpoints would be lost with the pods; mount one with cluster.volume_claims"
    )


def folder_of_each_node(job: Job) -> str | None:
    """Say where each pod would have a run's folder of its own, None where all see one.

    Whether a claim is one for all pods only the cluster knows; the agents say so as they meet.
    """
    if not isinstance(cluster := job.cluster, K8sCluster) or job.num_nodes_max < 2:
        return None
    if not isinstance(mount := cluster.mount_of(cluster.run_path), HostPath):
        return None
    return (
        f"cluster.run_path {cluster.run_path!r} is below the cluster.host_paths "
        f"{mount.mount_path!r}, so each of the {job.num_nodes_max} nodes would keep its own part "
        "of the run's folder on its own disk, and none would have the whole result; allowed: a "
        "run_path on one of cluster.volume_claims"
    )


def folder_of_program(job: Job) -> str | None:
    """Say that the recipe names no folder of a script on the nodes of a cluster, else None."""
    trainer = job.trainer
    if not isinstance(trainer, ScriptTrainer) or job.cluster.kind == "local":
        return None
    is_relative = "/" in trainer.entry or trainer.entry.endswith(".py")
    if trainer.folder or trainer.module or trainer.entry.startswith("/") or not is_relative:
        return None
    return (
        f"trainer.folder null does not say where trainer.entry {trainer.entry!r} lies on the "
        "nodes; allowed: the absolute path of its folder there, or of the entry"
    )


def unmounted_inputs(job: Job) -> str | None:
    """Say which inputs of a Kubernetes job its image has to hold, None where volumes do."""
    if not isinstance(cluster := job.cluster, K8sCluster):
        return None
    inputs = {"model.weights": job.model.weights if job.model else None}
    if isinstance(job.trainer, ScriptTrainer):
        inputs["trainer.folder"] = job.trainer.folder
    if job.memoryd:
        inputs["resilience.tiered.token_file"] = job.memoryd.token_file
    if isinstance(job.data, Jsonl):
        inputs["data.path"] = job.data.path
    if isinstance(job.data, (Jsonl, S3Jsonl)):
        inputs["data.tokenizer"] = job.data.tokenizer
    missing = [
        f"{key} {path!r}"
        for key, path in inputs.items()
        if path and path.startswith("/") and cluster.mount_of(path) is None
    ]
    if not missing:
        return None
    return f"{', '.join(missing)}: on no volume, so the image has to hold it"


def partition_limit(job: Job) -> str | None:
    """Say that the limit of a Slurm partition may end a run for good, None where it does not."""
    if not isinstance(job.cluster, SlurmCluster) or job.time_limit or requeues_at_limit(job):
        return None
    return (
        "time_limit null leaves the run to its partition's limit (DefaultTime or else MaxTime of "
        "`scontrol show partition`). Slurm does not queue it again then; set time_limit"
    )


def is_installed(module: str) -> bool:
    """Return whether this Python has a module; others may share the package that it is in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_trainer_installed(job: Job) -> None:
    """Raise OutsideError where this Python has nothing to train the job with."""
    if isinstance(job.trainer, ScriptTrainer):
        # Its program knows what it needs.
        return
    needed = [("torch", "torch", "train", "install")]
    if isinstance(job.trainer, MegatronTrainer):
        needed.append(("megatron.core", "Megatron-Core", "megatron", "install-megatron"))
    for module, name, extra, target in needed:
        if not is_installed(module):
            raise OutsideError(
                f"action 'run' trains with {name}, which this Python does not have; install "
                f"training-recipes[{extra}], or run `make {target}` in a checkout"
            )

"""What this version cannot run, or would run to nobody's use, said before it starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePosixPath

from launcher.clusters.memoryd import memoryd_settings
from launcher.errors import OutsideError, RecipeError
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.workload import Jsonl, MegatronTrainer, S3Jsonl


def check_runnable(job: Job, action: str) -> None:
    """Refuse to start a job that could not train, or whose results would be lost.

    Raises RecipeError that says what to change.
    """
    missing = []
    if isinstance(job.trainer, MegatronTrainer):
        missing.append("trainer.kind 'megatron' (it runs: 'torch')")
    if job.resilience.elastic:
        missing.append("resilience.elastic")
    if job.resilience.checkpointless and is_hyperpod(job):
        # hyperpodrun would start the workers, and none would recover from another's memory.
        missing.append(
            "resilience.checkpointless with cluster.job_kind 'hyperpod' (it runs: 'job')"
        )
    if memoryd_settings(job) and is_hyperpod(job):
        # Nobody has seen under which names its pods reach each other.
        missing.append(
            "resilience.tiered.backend 'memoryd' with cluster.job_kind 'hyperpod' (it runs: 'job')"
        )
    if missing:
        raise RecipeError(
            f"action {action!r}: this version renders, but cannot run, {' and '.join(missing)}; "
            "use action=render, or leave that out"
        )
    if loss := lost_results(job) or lost_checkpoints(job):
        raise RecipeError(f"action {action!r}: {loss}")


def is_hyperpod(job: Job) -> bool:
    """Say whether HyperPod's own agent starts the workers."""
    return isinstance(job.cluster, K8sCluster) and job.cluster.job_kind == "hyperpod"


def lost_results(job: Job) -> str | None:
    """Say where a Kubernetes job's checkpoint would be lost with its pods, None where not."""
    if not isinstance(cluster := job.cluster, K8sCluster):
        return None
    writable = [claim.mount_path for claim in cluster.volume_claims if not claim.read_only]
    writable += [folder.mount_path for folder in cluster.host_paths if not folder.read_only]
    if _is_below(cluster.run_path, writable):
        return None
    return (
        f"cluster.run_path {cluster.run_path!r} is on no volume, so events and checkpoint would "
        "be lost with the pods; mount one with cluster.volume_claims, and set cluster.run_path "
        "below its mount_path"
    )


def lost_checkpoints(job: Job) -> str | None:
    """Say where a Kubernetes job's store is a folder that goes with its pods, None where not."""
    tiered = job.resilience.tiered
    if not isinstance(cluster := job.cluster, K8sCluster) or not tiered or not tiered.store:
        return None
    kind, _, path = (tiered.store.url or "").partition(":")
    writable = [claim.mount_path for claim in cluster.volume_claims if not claim.read_only]
    if kind != "folder" or _is_below(path, writable):
        return None
    return (
        f"resilience.tiered.store.url {tiered.store.url!r} is on no claim that all pods write to, "
        "so checkpoints would be lost with the pods; mount one with cluster.volume_claims"
    )


def unmounted_inputs(job: Job) -> str | None:
    """Say which inputs of a Kubernetes job its image has to hold, None where volumes do."""
    if not isinstance(cluster := job.cluster, K8sCluster):
        return None
    mounted = [claim.mount_path for claim in cluster.volume_claims]
    mounted += [folder.mount_path for folder in cluster.host_paths]
    inputs = {"model.weights": job.model.weights}
    if isinstance(job.data, Jsonl):
        inputs["data.path"] = job.data.path
    if isinstance(job.data, (Jsonl, S3Jsonl)):
        inputs["data.tokenizer"] = job.data.tokenizer
    missing = [
        f"{key} {path!r}"
        for key, path in inputs.items()
        if path and path.startswith("/") and not _is_below(path, mounted)
    ]
    if not missing:
        return None
    return f"{', '.join(missing)}: on no volume, so the image has to hold it"


def _is_below(path: str, folders: list[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def check_trainer_installed() -> None:
    """Raise OutsideError where this Python has no torch to train with."""
    if find_spec("torch") is None:
        raise OutsideError(
            "action 'run' trains with torch, which this Python does not have; install "
            "training-recipes[train], or run `make install` in a checkout"
        )

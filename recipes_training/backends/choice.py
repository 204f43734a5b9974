"""Chooses what takes a job's checkpoints, and imports that alone."""

from __future__ import annotations

from pathlib import Path

from launcher.job import TrainingJob
from recipes_training.checkpoints import Checkpoints
from recipes_training.errors import TrainingError
from resilience.events import EventLog


def open_checkpoints(
    job: TrainingJob, *, run_dir: Path, node: str, events: EventLog
) -> Checkpoints:
    """Return the checkpoints that a job asks for.

    Raises TrainingError where what they need is missing on this node.
    """
    settings = job.resilience.tiered
    if settings is None:
        return Checkpoints()
    if settings.store is not None and settings.store.url is None:
        raise TrainingError(
            "resilience.tiered.store.url is null, where the checkpoints go; set it or "
            "cluster.checkpoint_store_url, and render the job again"
        )
    if settings.backend == "aws":
        from recipes_training.backends.aws import AwsCheckpoints

        return AwsCheckpoints(job, settings, run_dir=run_dir, events=events)
    from recipes_training.backends.tiered import open_tiers

    return open_tiers(job, run_dir=run_dir, node=node, events=events)

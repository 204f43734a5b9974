"""Phases of a worker, from its start to its end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STARTING = "starting workers"
RECOVERY = "recovery"
TRAINING = "training"
CHECKPOINT = "checkpoint"
FAILED = "failed"

# From the first phase to the last; each event ends one phase and begins the next.
PHASES = (STARTING, "process group", "data", "model", RECOVERY, TRAINING, CHECKPOINT, "finished")
PHASE_AFTER: Mapping[str, str] = {
    "worker_started": "process group",
    "process_group_ready": "data",
    "data_ready": "model",
    "model_ready": TRAINING,
    "checkpoint_started": CHECKPOINT,
    "checkpoint_written": TRAINING,
    "worker_finished": "finished",
    "worker_failed": FAILED,
    "worker_stopped": "stopped",
    "worker_replaced": STARTING,
    "rank_stopped": RECOVERY,
    "rank_recovered": TRAINING,
    "rank_resumed": TRAINING,
}
# A rank that recovers in its process passes these again, and is still recovering.
PASSED_IN_RECOVERY = {"process_group_ready", "data_ready", "model_ready"}
LOST = "lost"
STANDBY = "standing by"


def phase_after(event: str, now: str | None) -> str | None:
    """Return the phase of a rank after an event of its own, None for one that changes nothing."""
    if now == RECOVERY and event in PASSED_IN_RECOVERY:
        return None
    return PHASE_AFTER.get(event)


def last_phase(phases: Sequence[str], num_workers: int) -> str:
    """Return what workers do as a whole: what the last of them does."""
    for ended in (FAILED, "stopped"):
        if ended in phases:
            return ended
    # Rank 0 alone reports the checkpoint; the others go on training by their events.
    for shared in (RECOVERY, CHECKPOINT):
        if shared in phases:
            return shared
    if len(phases) < num_workers:
        return STARTING
    return min(phases, key=PHASES.index)

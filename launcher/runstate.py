"""Where a run stands: a value that events turn into the next one.

Pure: no file, no clock, no console. Progress shows it, and the summary at the
end of a run is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.job import Job
from resilience.events import Event

LAUNCHER_NODE = "launcher"
STARTING = "starting workers"
TRAINING = "training"
CHECKPOINT = "checkpoint"
FAILED = "failed"

# From the first phase to the last; each event ends one phase and begins the next.
PHASES = (STARTING, "process group", "data", "model", TRAINING, CHECKPOINT, "finished")
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
}
# Seconds per step is the mean of this many.
_NUM_RECENT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The node of one rank, and what the rank is doing."""

    node: str
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What is known of a run by its events so far."""

    recipe: str
    version: int
    max_steps: int
    nodes: tuple[str, ...]
    """Names of the nodes that the job has."""
    num_devices: int
    started_at: float | None = None
    generation: int = 0
    workers: Mapping[int, Worker] = field(default_factory=dict)
    """By rank, of the newest generation."""
    num_steps: int = 0
    """Steps that are done: step numbers begin at 0."""
    first_loss: float | None = None
    loss: float | None = None
    lr: float | None = None
    recent: tuple[tuple[int, float], ...] = ()
    """(step number, seconds) of the newest steps that were reported."""
    failure: Event | None = None
    """The first worker_failed: what failed later mostly failed because of it."""
    checkpoint: str | None = None
    exit_status: int | None = None
    reason: str | None = None
    finished_at: float | None = None

    @property
    def num_workers(self) -> int:
        """Return how many workers the job has."""
        return len(self.nodes) * self.num_devices

    @property
    def phase(self) -> str:
        """Return what the run as a whole is doing: what its last worker does."""
        return _last_phase([worker.phase for worker in self.workers.values()], self.num_workers)

    def node_phase(self, node: str) -> str:
        """Return what a node's last worker is doing."""
        phases = [worker.phase for worker in self.workers.values() if worker.node == node]
        return _last_phase(phases, self.num_devices)

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean of the newest steps, None before the first."""
        if not self.recent:
            return None
        return sum(seconds for _, seconds in self.recent) / len(self.recent)

    @property
    def seconds_left(self) -> float | None:
        """Return how long the remaining steps take at the present pace."""
        pace = self.seconds_per_step
        return None if pace is None else pace * max(0, self.max_steps - self.num_steps)


def start_state(job: Job, nodes: Sequence[str]) -> RunState:
    """Return the state of a job that has no event yet."""
    return RunState(
        recipe=job.recipe.name,
        version=job.recipe.version,
        max_steps=job.trainer.max_steps,
        nodes=tuple(nodes),
        num_devices=job.trainer.num_devices,
    )


def next_state(state: RunState, event: Event) -> RunState:
    """Return the state after an event; one that means nothing here changes nothing."""
    if event.node == LAUNCHER_NODE and event.rank is None:
        return _after_launcher(state, event)
    if event.rank is None or event.generation < state.generation:
        return state
    if event.generation > state.generation:
        state = replace(
            state,
            generation=event.generation,
            workers={},
            num_steps=0,
            first_loss=None,
            recent=(),
        )
    return _after_worker(state, event, event.rank)


def _after_launcher(state: RunState, event: Event) -> RunState:
    if event.event == "run_started":
        return replace(state, started_at=event.time)
    if event.event == "run_finished":
        return replace(
            state,
            finished_at=event.time,
            exit_status=int(event.fields.get("exit_status", 1)),
            reason=str(event.fields.get("reason", "")),
        )
    return state


def _after_worker(state: RunState, event: Event, rank: int) -> RunState:
    if event.event == "step":
        return _after_step(state, event)
    if event.event == "worker_failed" and state.failure is None:
        state = replace(state, failure=event)
    if event.event == "checkpoint_written":
        state = replace(state, checkpoint=str(event.fields.get("path", "")))
    if phase := PHASE_AFTER.get(event.event):
        workers = {**state.workers, rank: Worker(node=event.node, phase=phase)}
        return replace(state, workers=workers)
    return state


def _after_step(state: RunState, event: Event) -> RunState:
    if event.step is None:
        return state
    loss = to_float(event.fields.get("loss"))
    seconds = to_float(event.fields.get("duration_s"))
    recent = state.recent if seconds is None else (*state.recent, (event.step, seconds))
    return replace(
        state,
        num_steps=event.step + 1,
        first_loss=loss if state.first_loss is None else state.first_loss,
        loss=loss,
        lr=to_float(event.fields.get("lr")),
        recent=recent[-_NUM_RECENT:],
    )


def to_float(value: Any) -> float | None:
    """Return an event's number, NaN and the infinities among them; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _last_phase(phases: list[str], num_workers: int) -> str:
    for ended in (FAILED, "stopped"):
        if ended in phases:
            return ended
    # Rank 0 alone reports the checkpoint; the others go on training by their events.
    if CHECKPOINT in phases:
        return CHECKPOINT
    if len(phases) < num_workers:
        return STARTING
    return min(phases, key=PHASES.index)

"""Where a run stands: a value that events turn into the next one.

Pure: no file, no clock, no console. Progress shows it, and the summary at the
end of a run is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from launcher.job import Job
from launcher.job.workload import ScriptTrainer
from launcher.monitor.checkpoints import Checkpoint, newest_saved, next_checkpoints
from launcher.monitor.duration import format_seconds
from launcher.monitor.meeting import Meeting, next_meeting
from launcher.monitor.phases import LOST, RECOVERY, STANDBY, last_phase, phase_after
from launcher.monitor.programs import as_ours, code_text, teller_of
from launcher.monitor.recoveries import (
    Generation,
    Recovery,
    list_recoveries,
    next_generations,
    seconds_lost,
)
from launcher.monitor.standstill import standstill_limit_s, usual_step_s
from launcher.monitor.storage import Storage, lost_step, next_storage
from resilience.events import Event

LAUNCHER_NODE = "launcher"
# Of all starts of a run.
_KEPT = (
    *("recipe", "version", "max_steps", "nodes", "num_devices", "num_workers_wanted"),
    *(
        "keeps_state",
        "is_script",
        "awaits_lines",
        "log_every_n_steps",
        "num_steps",
        "first_loss",
        "loss",
        "tiers",
        "faults_left",
    ),
)
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
    max_steps: int | None
    """None where only the program knows."""
    nodes: tuple[str, ...]
    """Names of the nodes that the job has, those that stand by among them."""
    num_devices: int
    num_workers: int
    num_workers_wanted: int
    """Workers that each start of the run begins with, as its job says now."""
    keeps_state: bool
    """A new generation goes on with the state and the workers of the one before."""
    is_script: bool = False
    """The workers run a program of a user's."""
    awaits_lines: bool = False
    """Steps are looked for in what the program prints, and no line had one yet."""
    faults_left: int = 0
    """Faults of the recipe of a user's program that have not fired."""
    log_every_n_steps: int = 1
    code: Mapping[str, str] = field(default_factory=dict)
    """By node, the folder and commit of that program."""
    started_at: float | None = None
    starts: tuple[str, ...] = ()
    """Names of the starts that agents have told of; a scheduler starts a run again by itself."""
    meeting: Meeting = field(default_factory=Meeting)
    generation: int = 0
    workers: Mapping[int, Worker] = field(default_factory=dict)
    """By rank, of the newest generation."""
    lost_nodes: frozenset[str] = frozenset()
    silent_nodes: frozenset[str] = frozenset()
    """Nodes that are not heard, and without which the run has not gone on."""
    leaving_nodes: frozenset[str] = frozenset()
    """Nodes whose newest agent was asked to leave the run."""
    gone_nodes: Mapping[str, str] = field(default_factory=dict)
    """How nodes ended without which the run goes on, as this machine's launcher saw it."""
    late_batches: Mapping[int, str] = field(default_factory=dict)
    """By rank, a batch that its rank waits for, and why."""
    waits: tuple[str, float | None] = ("", None)
    """Why nodes wait that are there, and until when, in unix seconds, where time changes that."""
    generations: Mapping[int, Generation] = field(default_factory=dict)
    num_steps: int = 0
    """Steps that are done: step numbers begin at 0."""
    first_loss: float | None = None
    loss: float | None = None
    lr: float | None = None
    recent: tuple[tuple[int, float], ...] = ()
    """(step number, seconds) of the newest steps that were reported."""
    teller: tuple[object, ...] | None = None
    """The source of the newest step of the generation, for a user's program."""
    valued_step: int = -1
    """The newest step of the generation of which a loss is known."""
    stepped_at: float | None = None
    """When the newest step of this start was reported that was taken, in unix seconds."""
    failure: Event | None = None
    """The first worker_failed, of the newest generation where it begins with new workers: what
    failed later mostly failed because of it."""
    checkpoint: str | None = None
    """Path of the one that was written last."""
    checkpoint_bytes: int | None = None
    tiers: tuple[Checkpoint, ...] = ()
    """What happened to checkpoints in the memory of nodes and below it."""
    storage: Storage = field(default_factory=Storage)
    """What is known of the store below them."""
    domains: tuple[int, int] | None = None
    """In how many failure domains checkpoints in memory are, and in how many they are to be."""
    warnings: Mapping[str, float] = field(default_factory=dict)
    """Each warning since the newest generation was opened, and the time of its first event."""
    losses: Mapping[str, str] = field(default_factory=dict)
    """Work that services did not end: checkpoints that a store has not got. With the node whose
    agent told of it, and whose next agent begins with services of its own; empty for the run's."""
    exit_status: int | None = None
    reason: str | None = None
    finished_at: float | None = None

    @property
    def nodes_to_leave(self) -> frozenset[str]:
        """Return those that were asked to leave the run and are still there."""
        return self.leaving_nodes - self.lost_nodes

    def awaited_text(self, now: float) -> str:
        """Return which nodes a run waits for, of a broken one for how long; empty for none."""
        reason, until = self.waits
        if self.phase != RECOVERY or not reason or until is None:
            return self.missing_text(now)
        return f"waiting for {reason}, {format_seconds(max(0.0, until - now))} more"

    def missing_text(self, now: float) -> str:
        """Return which nodes have not joined a run that has not begun; empty while usual."""
        if self.has_opened or self.exit_status is not None:
            return ""
        return self.meeting.missing_text(self.num_workers_wanted // self.num_devices, now)

    @property
    def unkept(self) -> str:
        """Return in words that the last step of a run that was stopped is in no checkpoint."""
        newest = newest_saved(self.tiers)
        if newest is None or newest.step >= self.num_steps:
            return ""
        return f"step {self.num_steps} is in no checkpoint; the newest is of step {newest.step}"

    @property
    def num_here(self) -> int:
        """Return how many workers have not gone with their node."""
        away = self.lost_nodes | self.gone_nodes.keys()
        return sum(each.node not in away for each in self.workers.values())

    @property
    def has_opened(self) -> bool:
        """Return whether this start of the run has opened a generation, so that it has a size."""
        return any(each.opened_at is not None for each in self.generations.values())

    @property
    def training_nodes(self) -> frozenset[str]:
        """Return those that have workers: no node that still starts, waits or stands by."""
        return frozenset(worker.node for worker in self.workers.values())

    @property
    def is_deserted(self) -> bool:
        """Return whether all nodes have ended that have workers."""
        return bool(self.training_nodes) and self.training_nodes <= self.gone_nodes.keys()

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Return a recovery for each generation that a fault ended."""
        return list_recoveries(self.generations, self.standstill_limit_s)

    @property
    def death(self) -> tuple[Event, Worker] | None:
        """Return what was said of the first worker that died in the newest generation, and it."""
        for event in self.generations.get(self.generation, Generation()).detected:
            worker = None if event.rank is None else self.workers.get(event.rank)
            if worker and event.fields.get("reason") == "died":
                return event, worker
        return None

    @property
    def wall_s(self) -> float | None:
        """Return how long the run took, None while that is not known."""
        if self.started_at is None or self.finished_at is None:
            return None
        return self.finished_at - self.started_at

    @property
    def seconds_lost(self) -> float:
        """Return the seconds from faults to the first steps after them."""
        recoveries = self.recoveries
        last = recoveries[-1].fault_at if recoveries else 0.0
        return seconds_lost(recoveries, last if self.finished_at is None else self.finished_at)

    @property
    def standstill_limit_s(self) -> float | None:
        """Return the longest time between two reported steps that is usual; None without steps."""
        step_s = usual_step_s(seconds for _, seconds in self.recent)
        return None if step_s is None else standstill_limit_s(step_s, self.log_every_n_steps)

    def standstill_s(self, now: float) -> float | None:
        """Return how long a run that goes on has taken no step; None while that is usual."""
        limit_s, has_ended = self.standstill_limit_s, self.exit_status is not None
        if limit_s is None or self.stepped_at is None or has_ended:
            return None
        if self.max_steps is not None and self.num_steps >= self.max_steps:
            return None
        quiet_s = now - self.stepped_at
        return quiet_s if quiet_s > limit_s else None

    @property
    def phase(self) -> str:
        """Return what the run as a whole is doing: what its last worker does."""
        return last_phase([worker.phase for worker in self.workers.values()], self.num_workers)

    def node_phase(self, node: str) -> str:
        """Return what a node's last worker is doing."""
        if node in self.lost_nodes:
            return LOST
        phases = [worker.phase for worker in self.workers.values() if worker.node == node]
        if not phases and len(self.workers) == self.num_workers:
            return STANDBY
        return last_phase(phases, self.num_devices)

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
        if pace is None or self.max_steps is None:
            return None
        return pace * max(0, self.max_steps - self.num_steps)

    @property
    def steps_text(self) -> str:
        """Return how many steps are done, and of how many where that is known.

        Empty for a program that has told no steps.
        """
        if self.max_steps is None and not self.num_steps:
            return ""
        return f"{self.num_steps}{'' if self.max_steps is None else f' of {self.max_steps}'}"

    @property
    def unmatched_text(self) -> str:
        """Return that no line of a program that has begun was one of a step; empty for others."""
        is_unmatched = self.awaits_lines and self.has_opened
        return "trainer.progress matched no line" if is_unmatched else ""

    @property
    def code_text(self) -> str:
        """Return where the program's code was; once where it was the same on all nodes."""
        return "; ".join(dict.fromkeys(self.code.values()))


def start_state(job: Job, nodes: Sequence[str]) -> RunState:
    """Return the state of a job that has no event yet."""
    is_script, faults = isinstance(job.trainer, ScriptTrainer), job.resilience.faults
    return RunState(
        recipe=job.recipe.name,
        version=job.recipe.version,
        max_steps=job.trainer.max_steps,
        nodes=tuple(nodes),
        num_devices=job.trainer.workers_per_node,
        num_workers=job.trainer.world_size,
        num_workers_wanted=job.trainer.world_size,
        keeps_state=job.resilience.checkpointless is not None,
        is_script=is_script,
        faults_left=len(faults.injected) if is_script and faults else 0,
        awaits_lines=isinstance(job.trainer, ScriptTrainer) and bool(job.trainer.progress),
        log_every_n_steps=job.trainer.steps_between_events,
    )


def next_state(state: RunState, event: Event) -> RunState:
    """Return the state after an event; one that means nothing here changes nothing."""
    if not state.is_script:
        return next_own_state(state, event)
    return reduce(next_own_state, as_ours(event, state.nodes, state.num_devices), state)


def next_own_state(state: RunState, event: Event) -> RunState:
    """Return the state after an event as workers of ours write it."""
    if event.node == LAUNCHER_NODE and event.rank is None:
        return _after_launcher(state, event)
    start = event.fields.get("start") if event.event == "agent_started" else None
    if isinstance(start, str) and start not in state.starts:
        again = _begun_again(state, event.time) if state.starts else state
        state = replace(again, starts=(*state.starts, start))
    if event.event == "warning":
        told = str(event.fields.get("text", ""))
        state = replace(state, warnings={told: event.time, **state.warnings})
    generations = next_generations(state.generations, event)
    text = lost_step(state.storage, event)
    state = replace(
        state,
        meeting=next_meeting(state.meeting, event),
        generations=generations,
        faults_left=state.faults_left - (event.event == "fault_injected"),
        tiers=next_checkpoints(state.tiers, event),
        storage=next_storage(state.storage, event),
        losses={**state.losses, **({text: ""} if text else {})},
    )
    if event.rank is None:
        return _after_node(state, event)
    if event.generation < state.generation and (event.event == "step" or not state.keeps_state):
        return state
    if event.generation > state.generation:
        state = _next_generation(state, event.generation)
    return _after_worker(state, event, event.rank)


def _next_generation(state: RunState, generation: int) -> RunState:
    state = replace(state, generation=generation)
    if state.keeps_state:
        return state
    # A program goes on from checkpoints of its own, and says itself how far that is.
    num_steps = state.num_steps if state.is_script else 0
    state = replace(state, teller=None, valued_step=-1)
    return replace(state, workers={}, num_steps=num_steps, failure=None)


def _after_node(state: RunState, event: Event) -> RunState:
    node = str(event.fields.get("node", event.node))
    if event.event == "node_lost":
        is_silent = event.fields.get("is_dead") is False
        silent = state.silent_nodes | {node} if is_silent else state.silent_nodes - {node}
        return replace(state, lost_nodes=state.lost_nodes | {node}, silent_nodes=silent)
    if event.event == "node_joined":
        return replace(
            state, lost_nodes=state.lost_nodes - {node}, silent_nodes=state.silent_nodes - {node}
        )
    if event.event == "node_ended":
        return replace(state, silent_nodes=state.silent_nodes - {node})
    if event.event == "code_seen":
        return replace(state, code={**state.code, event.node: code_text(event)})
    if event.event == "service_lost":
        text = f"{event.fields.get('service')} of {node} {event.fields.get('text')}"
        return replace(state, losses={**state.losses, text: node})
    if event.event == "node_left":
        return replace(state, leaving_nodes=state.leaving_nodes - {event.node})
    if event.event == "node_leaving":
        return replace(state, leaving_nodes=state.leaving_nodes | {event.node})
    if event.event == "agent_started":
        gone = {name: text for name, text in state.gone_nodes.items() if name != event.node}
        return replace(
            state,
            leaving_nodes=state.leaving_nodes - {event.node},
            gone_nodes=gone,
            losses={text: name for text, name in state.losses.items() if name != event.node},
            # Those of the node's agent before this one have ended.
            workers={rank: each for rank, each in state.workers.items() if each.node != event.node},
        )
    if event.event in ("nodes_wait", "node_awaited"):
        seconds = to_float(event.fields.get("seconds"))
        until = None if seconds is None else event.time + seconds
        return replace(state, waits=(str(event.fields.get("reason", "")), until))
    if event.event == "generation_opened":
        # Of a node that was lost, and of one that has left, no worker is left.
        num_workers = int(event.fields.get("world_size", state.num_workers))
        workers = {rank: each for rank, each in state.workers.items() if rank < num_workers}
        # Who waits still is told of anew.
        return replace(
            state,
            num_workers=num_workers,
            workers=workers,
            silent_nodes=frozenset(),
            late_batches={},
            waits=("", None),
            warnings={},
        )
    return state


def _after_launcher(state: RunState, event: Event) -> RunState:
    if event.event in ("run_started", "run_continued"):
        return _begun_again(state, event.time)
    if event.event == "node_gone":
        name, text = str(event.fields.get("node", "")), str(event.fields.get("text", ""))
        return replace(state, gone_nodes={**state.gone_nodes, name: text})
    if event.event == "run_finished":
        return replace(
            state,
            finished_at=event.time,
            exit_status=int(event.fields.get("exit_status", 1)),
            reason=str(event.fields.get("reason", "")),
        )
    return state


def _begun_again(state: RunState, time: float) -> RunState:
    """Return the state of a start of the run, which knows how far the ones before it came."""
    return RunState(
        **{name: getattr(state, name) for name in _KEPT},
        num_workers=state.num_workers_wanted,
        started_at=time,
        # Who fails now says so again.
        storage=replace(state.storage, failing={}),
    )


def _after_worker(state: RunState, event: Event, rank: int) -> RunState:
    if event.event == "step":
        return _after_step(state, event)
    if event.event == "batch_late":
        late = {**state.late_batches, rank: str(event.fields.get("text", ""))}
        return replace(state, late_batches=late)
    if event.event == "failure_domains":
        domains = int(event.fields.get("num", 0)), int(event.fields.get("wanted", 0))
        return replace(state, domains=domains)
    if event.event == "worker_failed" and state.failure is None:
        state = replace(state, failure=event)
    if event.event == "checkpoint_written":
        path, size = str(event.fields.get("path", "")), event.fields.get("num_bytes")
        size = size if isinstance(size, int) else None
        state = replace(state, checkpoint=path, checkpoint_bytes=size)
    if event.generation < state.generation:
        # Its node was silent, and the run has gone on.
        return state
    now = state.workers[rank].phase if rank in state.workers else None
    if phase := phase_after(event.event, now):
        workers = {**state.workers, rank: Worker(node=event.node, phase=phase)}
        return replace(state, workers=workers)
    return state


def _after_step(state: RunState, event: Event) -> RunState:
    if event.step is None:
        return state
    if event.fields.get("printed"):
        state = replace(state, awaits_lines=False)
    # A program of a user's may tell loss and rate of some steps alone.
    loss, lr = (to_float(event.fields.get(name)) for name in ("loss", "lr"))
    teller, is_valued = teller_of(event), loss is not None
    is_again = state.is_script and state.teller not in (None, teller)
    is_again = is_again and event.step < state.num_steps
    if is_again and not (is_valued and event.step > state.valued_step):
        return state
    loss, lr = state.loss if loss is None else loss, state.lr if lr is None else lr
    first_loss = loss if state.first_loss is None or event.step == 0 else state.first_loss
    if is_again:
        # Its values alone are new: another rank has told it, or the program itself.
        return replace(state, loss=loss, lr=lr, first_loss=first_loss, valued_step=event.step)
    seconds = to_float(event.fields.get("duration_s"))
    # The last step before a fault is written again after it, without a duration.
    recent, stepped_at = state.recent, state.stepped_at
    if seconds is not None:
        stepped_at = event.time
        recent = tuple(each for each in recent if each[0] != event.step)
        recent = (*recent, (event.step, seconds))
    return replace(
        state,
        silent_nodes=frozenset(),
        late_batches={},
        num_steps=event.step + 1,
        first_loss=first_loss,
        teller=teller,
        valued_step=event.step if is_valued else state.valued_step,
        loss=loss,
        lr=lr,
        recent=recent[-_NUM_RECENT:],
        stepped_at=stepped_at,
    )


def to_float(value: Any) -> float | None:
    """Return an event's number, NaN and the infinities among them; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None

"""Checkpoints in the memory of nodes, and below it, through each node's memoryd.

A save is begun with a step, while the device computes or in line, and is committed when
the step's gate is passed: only then is the state that it copies stable. Whatever fails in
it costs that checkpoint and nothing else. Imported for jobs with resilience.tiered alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.errors import ResilienceError
from resilience.events import EventLog
from resilience.settings import TieredSettings
from resilience.state.torch_state import TorchState
from resilience.state.view import StateView
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import TieredError
from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.saver import AbandonedError, Saver, Saving
from resilience.tiered.uploads import Cadence, decide_save
from training.errors import GroupError, TrainingError
from training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from training.plan import plan_device_type, plan_lineage, writes_shard
from training.torch_trainer.checkpoints import (
    FINISH_TIMEOUT,
    Begun,
    Checkpoints,
    Progress,
    Pulse,
)
from training.torch_trainer.tier_loading import LINEAGE, TierLoader

MEMORYD_DIR = "MEMORYD_DIR"
MEMORYD_TOKEN_FILE = "MEMORYD_TOKEN_FILE"
K8S_NAMESPACE = "LAUNCHER_K8S_NAMESPACE"

HISTORY = "history"
"""In the progress: what is added to generations, so that no two starts share a number."""

COMMIT_TIMEOUT_S = 20.0
"""How long a run that ends waits for its last commit."""


def open_tiers(job: Job, *, run_dir: Path, node: str, events: EventLog) -> TieredCheckpoints:
    """Return a job's checkpoints through the daemon that the environment names."""
    trainer, settings = job.trainer, job.resilience.tiered
    assert isinstance(trainer, TorchTrainer)
    assert settings is not None
    lineage = plan_lineage(job)
    # Two runs of one recipe are two jobs; a run that is started again is the same one.
    # In each namespace of a cluster pods call the folder the same.
    within = os.environ.get(K8S_NAMESPACE, "")
    text = f"{within}:{run_dir.resolve()}" if within else str(run_dir.resolve())
    place = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    path, token = _read_environment(os.environ)
    client = TieredClient(
        path,
        token=token,
        namespace=settings.namespace or f"run-{lineage[:12]}-{place}",
        job=f"{lineage}-{place}",
        node=node,
    )
    is_inline = settings.copy_while == "waiting" or (
        settings.copy_while == "auto" and plan_device_type(job) == "cpu"
    )
    return TieredCheckpoints(
        client,
        settings,
        trainer,
        events,
        lineage=lineage,
        is_inline=is_inline,
    )


def _read_environment(variables: Mapping[str, str]) -> tuple[Path, str]:
    """Return the daemon's socket and token."""
    if not (folder := variables.get(MEMORYD_DIR)):
        raise TrainingError(
            f"the variable {MEMORYD_DIR} is not set, which names the folder of this node's "
            "memoryd; start the run with the launcher, or leave resilience.tiered out"
        )
    token = ""
    if name := variables.get(MEMORYD_TOKEN_FILE):
        try:
            token = Path(name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{MEMORYD_TOKEN_FILE} {name!r} cannot be read: {error}") from error
    return Path(folder) / SOCKET_NAME, token


@dataclass(slots=True)
class _UnderWay:
    """A save that is not over, and for how long it has held up training."""

    saving: Saving
    blocked_s: float = 0.0
    is_settled: bool = False
    """It is decided whether it is committed."""


class TieredCheckpoints(Checkpoints):
    """Saves and loads one rank's shard. For the training thread."""

    def __init__(
        self,
        client: TieredClient,
        settings: TieredSettings,
        trainer: TorchTrainer,
        events: EventLog,
        *,
        lineage: str,
        is_inline: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._trainer = trainer
        self._events = events
        self._lineage = lineage
        self._is_inline = is_inline
        self._clock = clock
        self._num_shards = trainer.num_shards or 1
        self._cadence = Cadence(
            every_n_steps=settings.ram.every_n_steps, every_s=settings.ram.every_s
        )
        self._has_store = settings.store is not None
        self._saver = Saver(client, num_shards=self._num_shards)
        self._last_s: float | None = None
        self._under_way: _UnderWay | None = None
        self._has_warned = False
        self._is_leader = False
        self._is_writer = False
        self._stall_s = 0.0
        self._newest = 0
        self._view: StateView
        self._progress: Progress
        self._check: Callable[[], None] = _go_on

    def bind(
        self,
        view: StateView,
        progress: Progress,
        group: WorkerGroup,
        *,
        state: TorchState,
        stall_s: float,
    ) -> None:
        """Take what the checkpoints are of."""
        environment = group.environment
        self._view, self._progress, self._stall_s = view, progress, stall_s
        self._check = group.check or _go_on
        self._is_leader = environment.rank == 0
        self._is_writer = writes_shard(self._trainer, environment.rank, environment.local_rank)

    # ---- saving

    def wants_save(self) -> bool:
        """Say whether so many seconds have passed that rank 0 asks for a checkpoint."""
        return self._is_leader and self._cadence.every_s is not None and self._is_due(0)

    def begin_step(self, step: int, *, generation: int, is_requested: bool, pulse: Pulse) -> bool:
        """Begin to save the state, if it is due."""
        self._settle()
        is_due = generation >= 0 and self._is_wanted(step, is_requested=is_requested)
        if is_due:
            self._start(step, generation, pulse)
        return is_due

    def before_update(self, pulse: Pulse) -> None:
        """Return when what was begun is copied, and the update may write."""
        under_way = self._under_way
        if under_way is not None and not under_way.is_settled:
            self._await_copy(under_way, pulse)

    def keep(self) -> None:
        """Let what was begun become visible: it is what the last update left."""
        under_way = self._under_way
        if under_way is not None and not under_way.is_settled:
            under_way.saving.commit()
            under_way.is_settled = True

    def abandon(self) -> None:
        """Leave what was begun, unless it is committed already."""
        if self._under_way is not None:
            self._under_way.saving.abandon()
            self._under_way.is_settled = True

    def finish(
        self,
        step: int,
        *,
        generation: int,
        is_forced: bool,
        group: WorkerGroup,
        pulse: Pulse,
        check: Callable[[], None],
    ) -> None:
        """Save the last state, stable once all workers have come to it.

        The store gets it, too, whatever its cadence: memory may go with the run.
        """
        self._settle()
        is_begun = False
        if generation >= 0 and (is_forced or self._is_wanted(step, is_requested=False)):
            self._start(step, generation, pulse)
            try:
                with group.meet(f"tiers/finish/{step}", FINISH_TIMEOUT):
                    pass
            except GroupError as error:
                self.abandon()
                self._fail(step, str(error))
                return
            self.before_update(pulse)
            check()
            self.keep()
            is_begun = True
        if (under_way := self._under_way) is not None:
            under_way.saving.wait_over(COMMIT_TIMEOUT_S, check=self._check)
            self._settle(is_final=True)
        if is_begun and self._has_store:
            self._flush(step, generation)

    def _flush(self, step: int, generation: int) -> None:
        """Have this node's daemon send a step to the store before it ends."""
        number = self._progress.rest.get(HISTORY, 0) + generation
        try:
            self._client.flush(step=step, generation=number)
        except TieredError as error:
            self._fail(step, f"the store may not get it: {error}")

    def close(self) -> None:
        """End the connection to the daemon."""
        self._client.close()

    def _is_wanted(self, step: int, *, is_requested: bool) -> bool:
        """Say the same on every worker."""
        if self._cadence.every_s is None:
            return step > 0 and self._is_due(step)
        return is_requested

    def _is_due(self, step: int) -> bool:
        return decide_save(
            self._cadence, step=step, last_step=None, now_s=self._clock(), last_s=self._last_s
        ).is_due

    def _start(self, step: int, generation: int, pulse: Pulse) -> None:
        began_s = self._last_s = self._clock()
        if not self._is_writer:
            return
        if self._under_way is not None and not self._await_end(self._under_way):
            self._fail(step, f"the save of step {self._under_way.saving.step} has not ended")
            return
        try:
            saving = self._saver.start(
                self._view,
                step=step,
                generation=self._progress.rest.get(HISTORY, 0) + generation,
                is_stable=False,
            )
        except (ResilienceError, RuntimeError) as error:
            self._fail(step, str(error))
            return
        self._under_way = _UnderWay(saving, blocked_s=self._clock() - began_s)
        if self._is_inline:
            self._await_copy(self._under_way, pulse)

    def _await_copy(self, under_way: _UnderWay, pulse: Pulse) -> None:
        began_s = self._clock()
        try:
            if not under_way.saving.wait_copied(stall_s=self._stall_s, pulse=pulse):
                under_way.is_settled = True
                step = under_way.saving.step
                self._fail(step, f"the daemon or the copy stood still for {self._stall_s:g} s")
        finally:
            under_way.blocked_s += self._clock() - began_s

    def _await_end(self, under_way: _UnderWay) -> bool:
        """Return whether a save is over, waiting for one that was just given up."""
        under_way.saving.wait_over(self._stall_s, check=self._check)
        self._settle()
        return self._under_way is None

    def _settle(self, *, is_final: bool = False) -> None:
        """Tell what came of a save that is over."""
        under_way = self._under_way
        if under_way is None or not (under_way.saving.is_over or is_final):
            return
        self._under_way = None
        step = under_way.saving.step
        try:
            saved = under_way.saving.wait(0.0)
        except AbandonedError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a copy raises, the run goes on
            self._fail(step, str(error) or repr(error))
            return
        self._has_warned = False
        if self._is_leader:
            self._events.write(
                "checkpoint_saved",
                step=step,
                num_bytes=saved.num_bytes,
                seconds=saved.seconds,
                blocked_s=under_way.blocked_s,
            )

    def _fail(self, step: int, reason: str) -> None:
        """Tell that a checkpoint failed, on standard error once until one succeeds."""
        self._events.write("checkpoint_failed", step=step, reason=reason)
        if not self._has_warned:
            self._has_warned = True
            sys.stderr.write(f"training: no checkpoint of step {step}: {reason}; the run goes on\n")
            sys.stderr.flush()

    # ---- loading

    def begin_run(self, group: WorkerGroup, step: int) -> None:
        """Begin a history whose generations are above those of all before."""
        own = self._go_back(step, None) if self._is_leader else 0
        told = int(group.first_text("tiers/history", str(own), CHECKPOINT_TIMEOUT))
        if not self._is_leader:
            self._go_back(step, told)
        self._progress.rest[HISTORY] = told
        self._progress.rest[LINEAGE] = self._lineage

    def _go_back(self, step: int, number: int | None) -> int:
        """Tell this node's daemon; returns what the generations of the history count from."""
        try:
            return self._client.go_back(step=step, first_generation=number, check=self._check)
        except TieredError as error:
            self._fail(step, str(error))
            # As the daemon would have chosen, of what is known here.
            return number or max(int(time.time()), self._newest + 1)

    def load_newest(self, group: WorkerGroup, *, newer_than: int | None) -> Begun | None:
        """Load the newest step that every worker can have.

        Raises CheckpointError where it cannot be known which steps there are, and where none
        of those on offer could be loaded: to begin without would give up what is there.
        """
        loader = TierLoader(
            self._client,
            self._view,
            group,
            lineage=self._lineage,
            num_shards=self._num_shards,
            fail=self._fail,
        )
        loaded = loader.load_newest(newer_than=newer_than)
        self._newest = loader.newest_generation
        if loaded is None:
            return None
        source = "+".join(
            each if each.startswith("peer:") else each.partition(":")[0]
            for each in loaded.source.split("+")
        )
        self._events.write(
            "checkpoint_loaded",
            step=loaded.step,
            source=source,
            num_bytes=loaded.num_bytes,
            seconds=loader.load_s,
            num_bad=loaded.num_bad,
        )
        return Begun(step=loaded.step, source=source)


def _go_on() -> None:
    """Do nothing: a worker without an agent hears of nothing while it waits."""

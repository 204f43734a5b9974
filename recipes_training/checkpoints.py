"""Checkpoints that a run takes while it goes on, and begins from: what the loop asks of them.

`Checkpoints` itself takes none. `CadencedCheckpoints` has what its backends share: when to
save, which checkpoint is complete, and what is told of them. The backends stand in
`recipes_training.backends`; `backends.choice` returns what a job asks for and imports that alone.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from launcher.job import TrainingJob
from launcher.job.lineage import explain_misfit, fixed_values
from recipes_training.group import WorkerGroup
from recipes_training.plan import Placement
from recipes_training.progress import Progress
from resilience.events import EventLog
from resilience.state.view import StateView, WrappedView

if TYPE_CHECKING:  # a run without the feature imports nothing of it
    from resilience.settings import TieredSettings

STALL_S = 10.0
"""How long a copy of the state may stand still before it is given up."""
FINISH_TIMEOUT = timedelta(seconds=60)
"""How long the workers may take to have all ended their last update."""

LINEAGE = "lineage"
"""In the progress: what a job has to have for the state to fit it, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The state that a run goes on from."""

    step: int
    source: str
    """Where it was: ram, peer:NODE, s3, folder, aws, or branch for the state of another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the checkpoints of one generation are of."""

    state: StateView
    """The trainer's own view."""
    view: StateView
    """The same with the progress's small data."""
    progress: Progress
    group: WorkerGroup
    placement: Placement
    stall_s: float
    """For how long a copy may hold up an update without getting on."""
    pulse: Callable[[], None]
    """Shows that the worker gets on while it waits; may raise to end the wait."""


class Checkpoints:
    """Takes none, and finds none. For the training thread."""

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of, in each generation anew."""

    def load_newest(self, *, newer_than: int | None = None) -> Begun | None:
        """Load the newest state that all workers can have; None where none is newer.

        Every worker calls it. After a None the tensors may hold anything.
        """
        return None

    def begin_run(self, step: int) -> None:
        """Begin a history that goes on from a step, and makes void what others did after it.

        Every worker calls it. What tells histories apart is part of the progress from then on.
        """

    def wants_save(self) -> bool:
        """Return whether this worker asks for a checkpoint after the step that is being taken."""
        return False

    def begin_step(self, step: int, *, is_requested: bool) -> int | None:
        """Begin to save the state after `step` updates, if it is due, before a forward begins.

        Returns the step of a checkpoint that is known to be complete now and was not before,
        the same on every worker. Raises nothing but what the subject's `pulse` does, as all
        others.
        """
        return None

    def before_update(self) -> None:
        """Return when the update may write: what was begun is copied. The step is stable."""

    def keep(self) -> None:
        """Let what was begun become visible: the state, looked at since, is as it should be.

        Does not block.
        """

    def abandon(self) -> None:
        """Leave what was begun, as if it had never been: the step may have another outcome."""

    def finish(self, step: int) -> None:
        """Save the last state, and wait until that is done.

        Every worker calls it, with all steps done. Raises CorruptionError where the state is
        not what its last update left; that ends the save.
        """

    def save_part(self, step: int, check: Callable[[], None]) -> bool:
        """Save this worker's part of the state after `step` updates, without the others.

        Returns whether there is a place for it. `check` is called every now and then, and may raise
        to end it. Raises CheckpointError where the part cannot be saved.
        """
        return False

    @property
    def place(self) -> str:
        """Return in words where the checkpoints lie."""
        return ""

    def has_saved(self, step: int) -> bool:
        """Return whether this worker's part of a step's checkpoint was seen to be saved."""
        return False

    @property
    def is_unstored(self) -> bool:
        """Return whether this worker's part of the last state was lost to a store that requires it.

        Known after `finish`.
        """
        return False

    def wait_stored(self, step: int, limit_s: float) -> str | None:
        """Return when the store has this worker's part of the last state, or why it has not.

        To be called after `finish`; waits for at most `limit_s`.
        """
        return "the run has no store that says what it has"

    def close(self) -> None:
        """End what the checkpoints need: the run has succeeded."""


class SameLineage(WrappedView):
    """A view that takes over no rest of a run whose state does not fit the job.

    `lineage` is what has to be equal, by key.
    """

    def __init__(self, view: StateView, lineage: Mapping[str, Any]) -> None:
        super().__init__(view)
        self.read_rest = view.read_rest
        self._lineage = lineage

    def check_rest(self, rest: Mapping[str, Any]) -> None:
        """Raise ValueError that names what differs, and TypeError for no state of a run."""
        saved = rest["recovery"].get(LINEAGE)
        if not isinstance(saved, Mapping):
            raise TypeError("it does not say of which model it is, as states of runs do")
        if misfit := explain_misfit(saved, self._lineage):
            raise ValueError(misfit)

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take it over, where `check_rest` has nothing against it."""
        self.check_rest(rest)
        self._view.write_rest(rest)


class CadencedCheckpoints(Checkpoints, ABC):
    """Decides when a checkpoint is due, and tells what came of each.

    A backend says in `_start` how a save begins, and in `_settle` what became of it.
    """

    def __init__(
        self,
        job: TrainingJob,
        settings: TieredSettings,
        events: EventLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from resilience.tiered.uploads import Cadence

        self._events = events
        self._clock = clock
        self._lineage = fixed_values(job)
        self._cadence = Cadence(
            every_n_steps=settings.ram.every_n_steps, every_s=settings.ram.every_s
        )
        self._last_s: float | None = None
        self._begun: int | None = None
        """Step of the save that was begun last, unless it was left."""
        self._has_warned = False
        self._saved: int | None = None
        """Step of this worker's newest save that has ended well."""
        self._refused: list[str] = []
        """Why newer steps than the one that is being loaded are none to go on from."""
        self._subject: Subject
        self._view: SameLineage

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of."""
        self._subject = subject
        self._view = SameLineage(subject.view, self._lineage)

    def begin_run(self, step: int) -> None:
        """Say whose state it is from now on."""
        self._subject.progress.rest[LINEAGE] = self._lineage

    @property
    def _is_leader(self) -> bool:
        return self._subject.group.rank == 0

    def wants_save(self) -> bool:
        """Return whether so many seconds have passed that rank 0 asks for a checkpoint."""
        return self._is_leader and self._cadence.every_s is not None and self._is_due(0)

    def begin_step(self, step: int, *, is_requested: bool) -> int | None:
        """Begin to save the state, if it is due: then the save before it is complete."""
        self._settle()
        if not self._is_new or not self._is_wanted(step, is_requested=is_requested):
            return None
        self._start(step)
        complete, self._begun = self._begun, step
        return complete

    def has_saved(self, step: int) -> bool:
        """Return whether this worker's part is saved, or another worker has that part."""
        return self._saved == step or not self._subject.placement.writes_shard

    def abandon(self) -> None:
        """Leave what was begun; until the next one is complete the one before counts."""
        self._begun = None

    @property
    def _is_new(self) -> bool:
        """Return whether this run has made the state, and neither loaded nor just filled it."""
        return self._subject.progress.step_generation >= 0

    def _is_wanted(self, step: int, *, is_requested: bool) -> bool:
        """Return the same on every worker."""
        if self._cadence.every_s is None:
            return step > 0 and self._is_due(step)
        return is_requested

    def _is_due(self, step: int) -> bool:
        from resilience.tiered.uploads import decide_save

        return decide_save(self._cadence, step=step, now_s=self._clock(), last_s=self._last_s)

    @abstractmethod
    def _start(self, step: int) -> None:
        """Begin a save of the state, which `keep` lets become visible."""

    @abstractmethod
    def _settle(self) -> None:
        """Tell what came of a save that is over."""

    def _tell_saved(self, step: int, *, num_bytes: int, seconds: float, blocked_s: float) -> None:
        self._has_warned = False
        self._saved = step
        if self._is_leader:
            self._events.write(
                "checkpoint_saved",
                step=step,
                num_bytes=num_bytes,
                seconds=seconds,
                blocked_s=blocked_s,
            )

    def _tell_loaded(
        self, step: int, *, source: str, num_bytes: int, seconds: float, num_bad: int = 0
    ) -> Begun:
        self._has_warned = False
        self._events.write(
            "checkpoint_loaded",
            step=step,
            source=source,
            num_bytes=num_bytes,
            seconds=seconds,
            num_bad=num_bad,
        )
        if self._refused and self._is_leader:
            self._tell_warning(f"the run goes on from step {step}: {'; '.join(self._refused)}")
        return Begun(step=step, source=source)

    def _tell_warning(self, text: str) -> None:
        self._events.write("warning", text=text)
        sys.stderr.write(f"recipes_training: {text}\n")
        sys.stderr.flush()

    def _refuse(self, step: int, reason: str) -> None:
        """Tell that a checkpoint cannot be loaded; an older one is tried."""
        self._events.write("checkpoint_unreadable", step=step, reason=reason)
        self._refused.append(f"step {step} cannot be loaded: {reason}")

    def _fail(self, step: int, reason: str, *, is_said: bool = True) -> None:
        """Tell that a checkpoint failed, on standard error once until one succeeds."""
        self._events.write("checkpoint_failed", step=step, reason=reason)
        if is_said and not self._has_warned:
            self._has_warned = True
            sys.stderr.write(
                f"recipes_training: no checkpoint of step {step}: {reason}; the run goes on\n"
            )
            sys.stderr.flush()

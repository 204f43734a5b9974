"""The whole state at the end of each epoch, for a run that loses every copy of a shard.

One file for each shard of one copy in run_dir/state/step-N, which all workers
have to see; the manifest appears by rename when all are there, and only then is
the older one removed. The state is written when all workers have met with it:
each has ended the same update, so no plan of a recovery goes back behind it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from launcher.job import Job
from resilience.comm.page import Activity
from resilience.events import EventLog
from resilience.state.view import StateView
from training.backends.tensor_file import write_tensors
from training.checkpoints import Begun, Checkpoints, Pulse, Subject
from training.errors import CheckpointError
from training.group import CHECKPOINT_TIMEOUT, WorkerGroup

STATE_FOLDER = "state"
_MANIFEST = "manifest.json"
_NOTHING = "none"


class EpochCheckpoint:
    """Writes and reads the run's state. Every worker of the group takes part in each call.

    `key` says which runs may go on from each other's state: their digest.
    """

    def __init__(self, run_dir: Path, view: StateView, *, key: str) -> None:
        self._folder = run_dir / STATE_FOLDER
        self._view = view
        self._key = key

    def write(
        self, step: int, rest: Mapping[str, Any], group: WorkerGroup, check: Callable[[], None]
    ) -> bool:
        """Write the state after `step` updates; False where it is there already.

        `check` raises where this worker's state is not what its last update left.
        Raises CheckpointError where the state cannot be written: on every worker
        for a shard, on worker 0 for the manifest. An older state is still there,
        and all workers can go on.
        """
        folder = self._folder / f"step-{step:08d}"
        topic = f"state/{step}"
        if self._newest(group, topic) == folder.name:
            return False
        problem = None
        with group.meet(topic, CHECKPOINT_TIMEOUT):
            check()
            if self._view.replica == 0:
                problem = self._write_shard(folder, rest, group)
        problem = group.first_problem(topic, problem, CHECKPOINT_TIMEOUT)
        is_leader = group.rank == 0
        # Who fails from here on has left its shard, and nobody waits for the manifest.
        if problem is None and is_leader:
            problem = self._publish(folder, step, group)
        if problem is not None:
            if is_leader:
                _remove_state(folder)
            raise CheckpointError(problem)
        return True

    def newest_step(self, group: WorkerGroup) -> int | None:
        """Return the step of the newest whole state, None without one."""
        name = self._newest(group, "state/offer")
        return None if name is None else int(name.rpartition("-")[2])

    def read(self, group: WorkerGroup) -> tuple[int, dict[str, Any]] | None:
        """Load the newest whole state in place; returns its step and rest, None without one."""
        if (name := self._newest(group, "state")) is None:
            return None
        path = self._shard_path(self._folder / name)
        try:
            with safe_open(path, framework="pt") as file:
                content = json.loads(file.metadata()["rest"])
                for each in self._view.tensors():
                    each.tensor.copy_(file.get_tensor(each.name))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read the state in {path}: {error}; remove {self._folder} to begin at the "
                "start"
            ) from error
        self._view.write_rest(content["view"])
        return int(name.rpartition("-")[2]), content["recovery"]

    def remove(self) -> None:
        """Remove all states: the run has ended."""
        for path in self._folder.glob("step-*"):
            _remove_state(path)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _newest(self, group: WorkerGroup, topic: str) -> str | None:
        """Return the folder of the newest whole state that worker 0 sees."""
        own = (self._whole() or [_NOTHING])[-1] if group.rank == 0 else ""
        name = group.first_text(f"{topic}/newest", own, CHECKPOINT_TIMEOUT)
        return None if name == _NOTHING else name

    def _whole(self) -> list[str]:
        """Return the folders of whole states of this run, the oldest first."""
        found = []
        for path in self._folder.glob(f"step-*/{_MANIFEST}"):
            try:
                manifest = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if manifest["key"] == self._key:
                found.append(path.parent.name)
        return sorted(found)

    def _shard_path(self, folder: Path) -> Path:
        return folder / f"shard-{self._view.shard or 0}.safetensors"

    def _write_shard(self, folder: Path, rest: Mapping[str, Any], group: WorkerGroup) -> str | None:
        """Write this worker's shard; returns why it could not be written."""
        path = self._shard_path(folder)
        content = {"view": self._view.read_rest(), "recovery": rest}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            write_tensors(
                draft,
                self._view.tensors(),
                metadata={"rest": json.dumps(content)},
                on_piece=group.check,
            )
            _publish_file(draft, path)
        except (OSError, ValueError) as error:
            return f"cannot write the state {path}: {error}"
        return None

    def _publish(self, folder: Path, step: int, group: WorkerGroup) -> str | None:
        """Let the state count, and no older one; returns why it cannot."""
        manifest = {"step": step, "generation": group.generation, "key": self._key}
        try:
            draft = folder / f"{_MANIFEST}.draft"
            draft.write_text(json.dumps(manifest) + "\n")
            _sync(draft)
            _publish_file(draft, folder / _MANIFEST)
        except OSError as error:
            return f"cannot write the state {folder}: {error}"
        for other in self._folder.glob("step-*"):
            if other != folder:
                _remove_state(other)
        return None


class EpochCheckpoints(Checkpoints):
    """Adds the state of each epoch's end to another backend's checkpoints.

    `show` shows what the worker does in a step. No deadline but the store's holds while it
    writes a state.
    """

    def __init__(
        self,
        other: Checkpoints,
        job: Job,
        *,
        run_dir: Path,
        events: EventLog,
        show: Callable[[int, Activity], None],
    ) -> None:
        self._other = other
        self._job = job
        self._run_dir = run_dir
        self._events = events
        self._show = show
        self._subject: Subject
        self._checkpoint: EpochCheckpoint

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of."""
        self._other.bind(subject)
        self._subject = subject
        self._checkpoint = EpochCheckpoint(self._run_dir, subject.state, key=self._job.digest())

    def begin_run(self, step: int) -> None:
        """Begin a history that goes on from a step."""
        self._other.begin_run(step)

    def wants_save(self) -> bool:
        """Return whether the other backend asks for a checkpoint."""
        return self._other.wants_save()

    def before_update(self, pulse: Pulse) -> None:
        """Return when what the other backend has begun is copied."""
        self._other.before_update(pulse)

    def keep(self) -> None:
        """Let what the other backend has begun become visible."""
        self._other.keep()

    def abandon(self) -> None:
        """Leave what the other backend has begun."""
        self._other.abandon()

    def finish(
        self,
        step: int,
        *,
        generation: int,
        is_forced: bool,
        pulse: Pulse,
        check: Callable[[], None],
    ) -> None:
        """Save the last state with the other backend."""
        self._other.finish(
            step, generation=generation, is_forced=is_forced, pulse=pulse, check=check
        )

    def load_newest(self, *, newer_than: int | None = None) -> Begun | None:
        """Load the newest state of either kind."""
        group, progress = self._subject.group, self._subject.progress
        newest = self._checkpoint.newest_step(group)
        if begun := self._other.load_newest(newer_than=newest):
            return begun
        if found := self._checkpoint.read(group):
            step, rest = found
            progress.take_rest(rest)
            return Begun(step=step, source="checkpoint")
        return None

    def begin_step(
        self, step: int, *, generation: int, is_requested: bool, pulse: Pulse
    ) -> int | None:
        """Write the state where an epoch has ended, and begin what else is due."""
        written = None
        batch_size = self._job.trainer.global_batch_size
        if ends_epoch(step, global_batch_size=batch_size, num_samples=self._subject.num_samples):
            self._show(step, Activity.NOWHERE)
            written = self._write(step)
            self._show(step, Activity.DATA)
        complete = self._other.begin_step(
            step, generation=generation, is_requested=is_requested, pulse=pulse
        )
        return complete if written is None else written

    def _write(self, step: int) -> int | None:
        """Write the state; returns its step where it is complete now.

        Where it cannot be written the run goes on: it has its state in memory, and only its
        last resort is older than it could be.
        """
        group, progress = self._subject.group, self._subject.progress
        try:
            is_written = self._checkpoint.write(step, progress.rest, group, progress.check)
        except CheckpointError as error:
            if group.rank == 0:
                text = (
                    f"{error}; the run goes on, and should it lose every copy of its state it goes "
                    "back to an older one; make room for two states, or mend the disk"
                )
                sys.stderr.write(f"training: {text}\n")
                self._events.write("warning", step=step, text=text)
            return None
        if is_written and group.rank == 0:
            self._events.write("state_written", step=step)
        return step if is_written else None

    def close(self) -> None:
        """Remove all states: the run has ended."""
        self._other.close()
        if self._subject.group.rank == 0:
            self._checkpoint.remove()


def ends_epoch(step: int, *, global_batch_size: int, num_samples: int) -> bool:
    """Return whether the step before `step` consumed the last sample of an epoch."""
    before, after = (step - 1) * global_batch_size, step * global_batch_size
    return step > 0 and before // num_samples < after // num_samples


def _publish_file(draft: Path, path: Path) -> None:
    """Give a file that is on the disk its name."""
    draft.replace(path)
    _sync(path.parent)


def _remove_state(folder: Path) -> None:
    """Remove a state, the manifest first: what is left without it counts for nothing."""
    with suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

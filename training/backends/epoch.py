"""The whole state at the end of each epoch, for a run that loses every copy of a shard.

One file for each shard of one copy in run_dir/state/step-N, which all workers
have to see; the manifest appears by rename when all are there, and only then is
the older one removed. The state is written when all workers have met with it:
each has ended the same update, so no plan of a recovery goes back behind it.

Workers that cannot meet, as those of a side of a broken network, write theirs into a folder with a
name of its own, step-N.NAME; who writes the last shard adds the manifest, and removes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from launcher.job import Job
from launcher.job.lineage import lineage_digest
from resilience.events import EventLog
from training.backends.tensor_file import write_tensors
from training.checkpoints import Begun, Subject
from training.errors import CheckpointError
from training.group import CHECKPOINT_TIMEOUT

STATE_FOLDER = "state"
_MANIFEST = "manifest.json"
_NOTHING = "none"
EPOCH_SOURCE = "checkpoint"
"""Source of a state that comes from here."""


class EpochCheckpoints:
    """Writes and reads the state of each epoch's end. Every worker takes part in each call."""

    def __init__(self, job: Job, *, run_dir: Path, events: EventLog) -> None:
        self.folder = run_dir / STATE_FOLDER
        self._key = lineage_digest(job)
        """Says which runs may go on from each other's state."""
        self._batch_size = job.trainer.global_batch_size
        self._events = events
        self._subject: Subject

    def bind(self, subject: Subject) -> None:
        """Take what the checkpoints are of, in each generation anew."""
        self._subject = subject

    def is_due(self, step: int) -> bool:
        """Return whether an epoch ends with the step before `step`."""
        return ends_epoch(
            step, global_batch_size=self._batch_size, num_samples=self._subject.num_samples
        )

    def save(self, step: int) -> bool:
        """Write the state after `step` updates; returns whether it was written now, and whole.

        Where it cannot be written the run goes on: it has its state in memory, and only its
        last resort is older than it could be.
        """
        is_leader = self._subject.group.rank == 0
        try:
            is_written = self.write(step)
        except CheckpointError as error:
            if is_leader:
                text = (
                    f"{error}; the run goes on, and should it lose every copy of its state it goes "
                    "back to an older one; make room for two states, or mend the disk"
                )
                sys.stderr.write(f"training: {text}\n")
                self._events.write("warning", step=step, text=text)
            return False
        if is_written and is_leader:
            self._events.write("state_written", step=step)
        return is_written

    def write(self, step: int) -> bool:
        """Write the state after `step` updates; False where it is there already.

        Raises CheckpointError where the state cannot be written: on every worker
        for a shard, on worker 0 for the manifest. An older state is still there,
        and all workers can go on. Raises CorruptionError where this worker's state
        is not what its last update left.
        """
        group, state = self._subject.group, self._subject.state
        folder = self.folder / f"step-{step:08d}"
        topic = f"state/{step}"
        if self._newest(topic) == folder.name:
            return False
        problem = None
        with group.meet(topic, CHECKPOINT_TIMEOUT):
            self._subject.progress.check()
            if state.replica == 0:
                problem = self._write_shard(folder, group.check)
        problem = group.first_problem(topic, problem, CHECKPOINT_TIMEOUT)
        is_leader = group.rank == 0
        # Who fails from here on has left its shard, and nobody waits for the manifest.
        if problem is None and is_leader:
            problem = self._publish(folder, step)
        if problem is not None:
            if is_leader:
                _remove_state(folder)
            raise CheckpointError(problem)
        return True

    def save_part(self, step: int, name: str, check: Callable[[], None]) -> bool:
        """Write this worker's shard of a state that others write as well, without meeting them.

        `name` is another one for every such state. Returns whether the state is whole now: that of
        the last to write. Raises CheckpointError where the shard cannot be written, and what
        `check` does.
        """
        if any(_step_of(each) == step for each in self._whole()):
            return True
        folder = self.folder / f"step-{step:08d}.{name}"
        if problem := self._write_shard(folder, check):
            raise CheckpointError(problem)
        num_shards = self._subject.group.layout.num_shards
        if not all((folder / _shard_name(number)).exists() for number in range(num_shards)):
            return False
        try:
            self._write_manifest(folder, step)
        except OSError as error:
            raise CheckpointError(f"cannot write the state {folder}: {error}") from error
        return True

    def newest_step(self) -> int | None:
        """Return the step of the newest whole state, None without one."""
        name = self._newest("state/offer")
        return None if name is None else _step_of(name)

    def load_newest(self) -> Begun | None:
        """Load the newest whole state in place; None without one."""
        if (name := self._newest("state")) is None:
            return None
        state = self._subject.state
        path = self._shard_path(self.folder / name)
        try:
            with safe_open(path, framework="pt") as file:
                content = json.loads(file.metadata()["rest"])
                for each in state.tensors():
                    each.tensor.copy_(file.get_tensor(each.name))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read the state in {path}: {error}; remove {self.folder} to begin at the "
                "start"
            ) from error
        self._subject.view.write_rest(content)
        return Begun(step=_step_of(name), source=EPOCH_SOURCE)

    def close(self) -> None:
        """Remove all states: the run has ended."""
        if self._subject.group.rank != 0:
            return
        for path in self.folder.glob("step-*"):
            _remove_state(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _newest(self, topic: str) -> str | None:
        """Return the folder of the newest whole state that worker 0 sees."""
        group = self._subject.group
        own = (self._whole() or [_NOTHING])[-1] if group.rank == 0 else ""
        name = group.first_text(f"{topic}/newest", own, CHECKPOINT_TIMEOUT)
        return None if name == _NOTHING else name

    def _whole(self) -> list[str]:
        """Return the folders of whole states of this run, the oldest first."""
        found = []
        for path in self.folder.glob(f"step-*/{_MANIFEST}"):
            try:
                manifest = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if manifest["key"] == self._key:
                found.append(path.parent.name)
        return sorted(found)

    def _shard_path(self, folder: Path) -> Path:
        return folder / _shard_name(self._subject.state.shard or 0)

    def _draft_of(self, path: Path) -> Path:
        """Return a file of this worker's own."""
        return path.with_suffix(f".{self._subject.group.rank}.draft")

    def _write_shard(self, folder: Path, check: Callable[[], None]) -> str | None:
        """Write this worker's shard; returns why it could not be written."""
        path, view = self._shard_path(folder), self._subject.view
        draft = self._draft_of(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_tensors(
                draft,
                view.tensors(),
                metadata={"rest": json.dumps(view.read_rest())},
                on_piece=check,
            )
            _publish_file(draft, path)
        except (OSError, ValueError) as error:
            return f"cannot write the state {path}: {error}"
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return None

    def _write_manifest(self, folder: Path, step: int) -> None:
        """Let the state count; raises OSError where it cannot."""
        generation = self._subject.group.generation
        manifest = {"step": step, "generation": generation, "key": self._key}
        draft = self._draft_of(folder / _MANIFEST)
        draft.write_text(json.dumps(manifest) + "\n")
        _sync(draft)
        _publish_file(draft, folder / _MANIFEST)

    def _publish(self, folder: Path, step: int) -> str | None:
        """Let the state count, and no older one; returns why it cannot."""
        try:
            self._write_manifest(folder, step)
        except OSError as error:
            return f"cannot write the state {folder}: {error}"
        for other in self.folder.glob("step-*"):
            if other != folder:
                _remove_state(other)
        return None


def ends_epoch(step: int, *, global_batch_size: int, num_samples: int) -> bool:
    """Return whether the step before `step` consumed the last sample of an epoch."""
    before, after = (step - 1) * global_batch_size, step * global_batch_size
    return step > 0 and before // num_samples < after // num_samples


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-").partition(".")[0])


def _shard_name(shard: int | str) -> str:
    return f"shard-{shard}.safetensors"


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

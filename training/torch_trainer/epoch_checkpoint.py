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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from resilience.state.view import StateView
from training.errors import CheckpointError
from training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from training.torch_trainer.tensor_file import write_tensors

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
        is_leader = group.environment.rank == 0
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
        own = (self._whole() or [_NOTHING])[-1] if group.environment.rank == 0 else ""
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
                on_piece=group.check or _go_on,
            )
            _publish_file(draft, path)
        except (OSError, ValueError) as error:
            return f"cannot write the state {path}: {error}"
        return None

    def _publish(self, folder: Path, step: int, group: WorkerGroup) -> str | None:
        """Let the state count, and no older one; returns why it cannot."""
        manifest = {"step": step, "generation": group.environment.generation, "key": self._key}
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


def ends_epoch(step: int, *, global_batch_size: int, num_samples: int) -> bool:
    """Say whether the step before `step` consumed the last sample of an epoch."""
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


def _go_on() -> None:
    """Do nothing: a worker without an agent hears of nothing while it writes."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The training program, with workers that die where no recipe lets them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from recipes_training import __main__ as program
from recipes_training.group import WorkerGroup
from recipes_training.loop import Loop
from recipes_training.steps.watch import RunWatch
from recipes_training.weights import export
from tests.recipes_training import spoiled


def _die_once(name: str) -> None:
    if _is_first(name):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_first(name: str) -> bool:
    try:
        (Path(os.environ["TEST_MARKERS"]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die_while_writing() -> None:
    """Let rank 0 die once when a part of the first file of the checkpoint is on the disk."""
    save_file = export.save_file

    def save_and_die(tensors: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half a file")
        _die_once("writer")
        save_file(tensors, path, **options)

    export.save_file = save_and_die  # type: ignore[assignment]


def die_while_waiting() -> None:
    """Let ranks 1 and 2 die once while rank 0 writes the checkpoint."""
    follow = WorkerGroup.follow

    def follow_or_die(group: WorkerGroup, topic: str, timeout: Any) -> None:
        if topic.endswith(".safetensors") and group.rank in (1, 2):
            _die_once(f"rank-{group.rank}")
        follow(group, topic, timeout)

    WorkerGroup.follow = follow_or_die  # type: ignore[method-assign]


def die_after_the_end() -> None:
    """Let a rank die once all have finished."""
    end = Loop.end

    def die_or_end(loop: Loop) -> None:
        _die_once("end")
        end(loop)

    Loop.end = die_or_end  # type: ignore[method-assign]


def die_in_forward() -> None:
    """Let rank 2 die in the forward of step 3 whenever it gets there."""
    forward = RunWatch.forward

    def forward_or_die(watch: Any, micro_batch: int, *, is_last: bool) -> None:
        if watch.step == 3 and watch._members.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        forward(watch, micro_batch, is_last=is_last)

    RunWatch.forward = forward_or_die  # type: ignore[method-assign]


def spoil() -> None:
    """TEST_SPOIL of tests.recipes_training.spoiled says what is wrong with a step."""
    getattr(spoiled, os.environ["TEST_SPOIL"])()


if __name__ == "__main__":
    globals()[os.environ["TEST_PROGRAM"]]()
    program.run_and_exit()

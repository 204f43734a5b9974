"""What torch itself has: torch.save, and DCP's asynchronous savers onto /dev/shm.

    python -m benchmarks.checkpoint_torch PLAN

The plan's option `case` is one of CASES.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint_state import (
    Figures,
    Plan,
    Ranks,
    State,
    Timed,
    change,
    check_equal,
    clear,
    copy_into,
    make_room,
    make_state,
    read_plan,
    run_laps,
    run_ranks,
)

CASES = ("save", "thread", "thread cached", "process", "process cached")


class Saver(Protocol):
    """One way to save and restore."""

    def start(self, state: State, folder: Path) -> None:
        """Begin to save; what this takes training waits for."""
        ...

    def wait(self) -> None:
        """Block until it is there."""
        ...

    def load(self, room: State, folder: Path) -> None:
        """Restore into tensors that are there."""
        ...

    def close(self) -> None:
        """End what it has begun."""
        ...


class TorchSaver:
    """torch.save, a file a rank."""

    def __init__(self, rank: int) -> None:
        self._name = f"{rank}.pt"

    def start(self, state: State, folder: Path) -> None:
        """Write the file."""
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / self._name)

    def wait(self) -> None:
        """Return at once: it is there."""

    def load(self, room: State, folder: Path) -> None:
        """Read the file, and copy."""
        copy_into(room, torch.load(folder / self._name))

    def close(self) -> None:
        """Do nothing."""


class DcpSaver:
    """DCP's asynchronous savers; cached: the memory of the copy stays, between processes shared."""

    def __init__(self, case: str) -> None:
        is_process = case.startswith("process")
        self._kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
        self._stager: DefaultStager | None = None
        if case.endswith("cached"):
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=is_process,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )

    def start(self, state: State, folder: Path) -> None:
        """Copy, and let a thread or a process write."""
        self._saving = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=False),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )

    def wait(self) -> None:
        """Block until it is written."""
        getattr(self._saving, "upload_completion", self._saving).result()
        del self._saving

    def load(self, room: State, folder: Path) -> None:
        """Read it back."""
        dcp.load(room, storage_reader=dcp.FileSystemReader(folder))

    def close(self) -> None:
        """Let the memory go."""
        if self._stager is not None:
            self._stager.close()


def run_rank(plan: Plan, rank: int, ranks: Ranks) -> None:
    """Save and restore, lap by lap."""
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    case = plan.options["case"]
    saver: Saver = TorchSaver(rank) if case == "save" else DcpSaver(case)
    state = make_state(plan, rank)
    room = make_room(plan, rank)

    def lap(step: int, figures: Figures) -> None:
        folder = plan.folder / f"step-{step}"
        figures.span("clone", ranks.run(lambda: copy_into(room, state)))
        change(state, step)
        ranks.barrier()
        began_s = time.monotonic()
        saver.start(state, folder)
        blocked_s = time.monotonic() - began_s
        # DCP's thread uses the same process group: nothing else may until it has ended.
        saver.wait()
        saved = Timed(began_s, time.monotonic())
        figures.slowest("blocked", blocked_s)
        figures.span("own RAM", saved)
        clear(room)
        figures.span("restore, living", ranks.run(lambda: saver.load(room, folder)))
        check_equal(state, room)
        ranks.barrier()
        if rank == 0:
            shutil.rmtree(folder)

    run_laps(plan, rank, lap, ranks)
    saver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_ranks(read_plan(sys.argv[1]), "ranks", run_rank)

"""One rank of this project's Megatron trainer, in the loop that every job of it has."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan
from benchmarks.recovery_peers import job, megatron_job
from recipes_training.megatron.cpu import stand_in

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
INJECTOR = FaultInjector(PLAN, LOG)

stand_in()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from recipes_training.__main__ import run_and_exit  # noqa: E402
from recipes_training.group import WorkerGroup  # noqa: E402
from recipes_training.megatron.trainer import MegatronTrainer  # noqa: E402
from recipes_training.trainer import StepResult  # noqa: E402
from resilience.state.digest import digest_state  # noqa: E402


class Striker:
    """The watch of the loop, with the benchmark's faults between forward and backward."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rank = self.step = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def backward(self, micro_batch: int) -> None:
        """Strike, where a fault is due."""
        self._inner.backward(micro_batch)
        INJECTOR.fire(self.rank, self.step)


class NotingStepper:
    """The trainer's stepper, with the step's loss noted and faults behind the update."""

    def __init__(self, inner: Any, striker: Striker) -> None:
        self._inner, self._striker = inner, striker
        self.loss: float | None = None
        """Of an update whose parameters are not gathered yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        """Compute the step."""
        self._striker.step, self.loss = step, None
        self._result: StepResult = self._inner.compute(rows, step=step)
        return self._result

    def update(self, lr: float) -> None:
        """Write the state, and strike then."""
        self._inner.update(lr)
        INJECTOR.fire(self._striker.rank, self._striker.step, "update")
        self.loss = self._result.loss


class Measured(MegatronTrainer):
    """Writes the benchmark's events."""

    def __init__(self, job: Any, watch: Any, *, is_restartable: bool) -> None:
        self._striker = Striker(watch)
        super().__init__(job, self._striker, is_restartable=is_restartable)

    def take_groups(self, group: WorkerGroup) -> None:
        """Take them; rank and stepper are known from then on."""
        is_first = self._model is None
        begin_s = time.monotonic()
        super().take_groups(group)
        taken_s = time.monotonic()
        self._striker.rank = group.rank
        if is_first:
            self.stepper: Any = NotingStepper(self.stepper, self._striker)
            return
        # Once more, as it was just done.
        self._bindings.rebind(self._groups)
        rebinding_s = time.monotonic() - taken_s
        seconds = {"opening_s": taken_s - begin_s - rebinding_s, "rebinding_s": rebinding_s}
        LOG.write("grouped", group.rank, generation=group.generation, **seconds)

    def settle(self) -> None:
        """End a step, or a recovery."""
        super().settle()
        rank, step, loss = self._striker.rank, self._striker.step, self.stepper.loss
        if loss is None:
            LOG.write("restored", rank, step=step)
            return
        self.stepper.loss = None
        bits = job.loss_bits(torch.tensor(loss))
        LOG.write("committed", rank, step=step, loss=bits, world=PLAN.num_ranks)

    def export(self, folder: Path) -> None:
        """Say what the run came to, in place of writing it."""
        folder.mkdir(exist_ok=True)
        digest = megatron_job.join_digests(digest_state(self.view))
        LOG.write("finished", self._striker.rank, digest=digest)


if __name__ == "__main__":
    folder = Path(PLAN.run_dir)
    sys.argv[1:] = [
        f"--job={folder / megatron_job.NAME}",
        f"--run-dir={folder}",
        "--node-name=node-0",
    ]
    run_and_exit(Measured)

"""One rank that takes steps of two copies of Megatron's model in turn: plain, and under recovery.

Run by `benchmarks.overhead_megatron` under the node agent. Both have the same layout, groups and
batches. All moments go to steps-RANK.json in the run folder.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.jobplan import read_plan
from benchmarks.recovery_peers import job, megatron_job
from recipes_training.megatron.cpu import stand_in

stand_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402
from megatron.core.tensor_parallel import layers, mappings  # noqa: E402
from torch import Tensor  # noqa: E402

# Before the trainer's own take their place.
_NAMES = ("dist_reduce_scatter_func", "dist_all_gather_func")
_PLACES = [
    (param_and_grad_buffer, "_coalescing_manager"),
    *((module, name) for module in (param_and_grad_buffer, layers, mappings) for name in _NAMES),
]
_MEGATRONS = [getattr(module, name) for module, name in _PLACES]

from benchmarks.recovery_peers.megatron_plain import PlainMegatron, average  # noqa: E402
from recipes_training.group import WorkerGroup  # noqa: E402
from recipes_training.megatron.trainer import MegatronTrainer  # noqa: E402
from recipes_training.plan import plan_schedule  # noqa: E402
from resilience.checkpointless.recovery import Recovery  # noqa: E402
from resilience.comm import waits  # noqa: E402
from resilience.comm.page import Activity  # noqa: E402
from resilience.inprocess.block import BlockOptions, reexecutable  # noqa: E402
from resilience.inprocess.generation import Generation  # noqa: E402

PLAN = read_plan()
JOB = megatron_job.read_job(PLAN)
SCHEDULE = plan_schedule(JOB)
clock = time.monotonic


class Marking:
    """Shows where it is, as the loop's watch does; asks for nothing and lets no fault strike."""

    generation: Generation
    places = ()

    def requests(self) -> int:
        """Ask for nothing."""
        return 0

    def reach(self, place: str) -> None:
        """Do nothing."""

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Note a forward pass."""
        self.generation.mark(Activity.FORWARD, 0, micro_batch)

    def backward(self, micro_batch: int) -> None:
        """Note a backward pass."""
        self.generation.mark(Activity.BACKWARD, 0, micro_batch)


class Contest:
    """Both copies on one rank."""

    def __init__(self, pairs: int, warm_up: int) -> None:
        self._pairs, self._warm_up = pairs, warm_up
        self._watch = Marking()
        self._trainer = MegatronTrainer(JOB, self._watch, is_restartable=True)
        self.recovery = Recovery(apply=self._apply)
        self._ours = [getattr(module, name) for module, name in _PLACES]

    def _apply(self, step: int) -> None:
        self._trainer.stepper.update(SCHEDULE.lr_at(step))

    def block(self, generation: Generation) -> None:
        """Take all steps and write what they showed."""
        self._watch.generation = generation
        self._trainer.take_groups(
            WorkerGroup(
                rank=generation.rank,
                layout=generation.layout,
                generation=generation.number,
                node="node-0",
                device=torch.device("cpu"),
                store=generation.store,
            )
        )
        self.recovery.bind(self._trainer.view)
        self.recovery.resume(generation, self._start)
        self.recovery.begin()
        self._trainer.settle()
        is_broken = waits._is_broken  # noqa: SLF001
        self._plain = PlainMegatron(JOB)
        turns, order = random.Random(job.SEED), ["plain", "ours"]
        found: dict[str, Any] = {"plain": [], "ours": [], "losses": {"plain": [], "ours": []}}
        for pair in range(self._pairs + self._warm_up):
            order.reverse()
            if pair % 2 == 0:
                turns.shuffle(order)
            for name in order:
                waits.slice_waits(is_broken if name == "ours" else None)
                for (module, place), value in zip(
                    _PLACES, self._ours if name == "ours" else _MEGATRONS, strict=True
                ):
                    setattr(module, place, value)
                begin_s, end_s, loss = self._take(name, self._draw(pair), pair, generation)
                found["losses"][name].append(loss)
                if pair >= self._warm_up:
                    found[name].append([begin_s, end_s])
        waits.slice_waits(is_broken)
        text = json.dumps(found)
        Path(PLAN.run_dir, f"steps-{generation.rank}.json").write_text(text, "utf-8")

    def _start(self, _: Any) -> int:
        self._trainer.fill()
        return 0

    def _take(
        self, name: str, rows: list[Tensor], step: int, generation: Generation
    ) -> tuple[float, float, float]:
        dist.barrier()
        begin_s = clock()
        if name == "plain":
            own = self._plain.take(rows, step)
            # To know the loss of all ranks is not counted: a plain loop need not at each step.
            return begin_s, clock(), average(own)
        self.recovery.begin()
        loss = self._trainer.stepper.compute(rows, step=step).loss
        with self.recovery.commit(generation):
            self._apply(step)
        self._trainer.settle()
        return begin_s, clock(), loss

    def _draw(self, step: int) -> list[Tensor]:
        rank = parallel_state.get_data_parallel_rank()
        size = parallel_state.get_data_parallel_world_size()
        trainer = JOB.trainer
        num = trainer.global_batch_size // (trainer.micro_batch_size * size)
        batches = [job.draw_batch(rank * num + each, step, size * num) for each in range(num)]
        return [torch.cat([rows, rows[:, :1]], dim=1) for rows in batches]


def main() -> None:
    """Run this rank until all ranks have finished."""
    torch.set_num_threads(1)
    contest = Contest(int(sys.argv[1]), int(sys.argv[2]))
    recovery = contest.recovery
    reexecutable(
        contest.block,
        report=recovery.report,
        enter=recovery.enter,
        options=BlockOptions(fatal=(Exception,)),
    )()


if __name__ == "__main__":
    main()

"""One rank of Megatron-Core under torchrun, with a distributed checkpoint in memory every step.

The model is that of this project's trainer, the loop a plain one with Megatron's own checkpoints.
After a fault torchrun ends all ranks and starts them again; they load the newest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan
from benchmarks.recovery_peers import job, megatron_job
from recipes_training.megatron.cpu import stand_in

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK = int(os.environ["RANK"])
LOG.write("started", RANK)

stand_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.recovery_peers.megatron_plain import PlainMegatron, average  # noqa: E402
from benchmarks.recovery_peers.newest_checkpoint import NewestCheckpoint, open_group  # noqa: E402
from launcher.job.workload import MegatronTrainer  # noqa: E402
from recipes_training.megatron.model import MegatronModel  # noqa: E402
from recipes_training.megatron.plan import plan_megatron  # noqa: E402
from recipes_training.megatron.state import MegatronState  # noqa: E402
from resilience.state.digest import digest_state  # noqa: E402

NEWEST = NewestCheckpoint(PLAN)

LOG.write("imported", RANK)


class StrikingMegatron(PlainMegatron):
    """Strikes between forward and backward."""

    _injector = FaultInjector(PLAN, LOG)
    _step = -1

    def take(self, rows: Sequence[Tensor], step: int) -> Tensor:
        """Take a step, and note it for the faults."""
        self._step = step
        return super().take(rows, step)

    def reduce(self, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Strike, where a fault is due."""
        self._injector.fire(RANK, self._step)
        return super().reduce(output)


def describe(model: MegatronModel, *, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's own description of what a checkpoint holds."""
    sharded = model.core.sharded_state_dict()
    optimizer = model.optimizer.sharded_state_dict(
        sharded, is_loading=is_loading, metadata={"distrib_optim_sharding_type": "dp_reshardable"}
    )
    return {"model": sharded, "optimizer": optimizer}


def save(model: MegatronModel, next_step: int) -> None:
    """Write a checkpoint, and name it the newest once it is whole."""
    folder = NEWEST.folder / str(next_step)
    if RANK == 0:
        # What an attempt before has left half written.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(describe(model, is_loading=False), str(folder))
    dist.barrier()
    NEWEST.name_step(next_step)


@torch.no_grad()
def restore(model: MegatronModel) -> int:
    """Load the newest checkpoint and return the step to go on with."""
    if not (next_step := NEWEST.read_step()):
        return 0
    folder = str(NEWEST.folder / str(next_step))
    loaded = dist_checkpointing.load(describe(model, is_loading=True), folder)
    model.core.load_state_dict(loaded["model"])
    model.optimizer.load_state_dict(loaded["optimizer"])
    # With torch's AdamW, Megatron leaves the loaded number of steps in the groups alone: all
    # parameters share one tensor, which has the number from before and is counted up by each.
    for part in model.parts:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                part.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))
    return next_step


def draw_rows() -> Any:
    """Return what draws this rank's micro batches: tensor ranks have the same."""
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()

    def draw(step: int) -> torch.Tensor:
        rows = job.draw_batch(rank, step, size)
        return torch.cat([rows, rows[:, :1]], dim=1)

    return draw


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    torch.set_num_threads(1)
    description = megatron_job.read_job(PLAN)
    assert isinstance(description.trainer, MegatronTrainer)
    open_group(PLAN)
    options = plan_megatron(description, description.trainer).parallel_state
    parallel_state.initialize_model_parallel(**options)
    LOG.write("joined", RANK)
    plain = StrikingMegatron(description)
    model = plain.model
    next_step = restore(model)
    LOG.write("restored", RANK, step=next_step)
    draw = draw_rows()
    for step in range(next_step, PLAN.num_steps):
        loss = average(plain.take([draw(step)], step))
        bits = job.loss_bits(torch.tensor(loss))
        LOG.write("committed", RANK, step=step, loss=bits, world=PLAN.num_ranks)
        if (step + 1) % PLAN.checkpoint_every == 0:
            save(model, step + 1)
    digest = megatron_job.join_digests(digest_state(MegatronState(model, replica=0, shard="")))
    LOG.write("finished", RANK, digest=digest)
    dist.barrier()
    dist.destroy_process_group()


# Megatron starts a process that imports this module to save.
if __name__ == "__main__":
    main()

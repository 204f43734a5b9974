"""One rank under an elastic torchrun: DDP at the size that there is, a checkpoint at each step.

After a change of size torchrun ends all ranks and starts them again at the new one; they load the
newest checkpoint. A global batch has the same samples at any size, as far as it divides.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

from benchmarks.events import EventLog
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOG.write("started", RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402

NUM_BATCHES = 12
FOLDER = Path(PLAN.run_dir, "checkpoints")
NEWEST = FOLDER / "newest"


def save(state: dict[str, torch.Tensor], next_step: int) -> None:
    """Write a checkpoint, and name it the newest once it is whole; the two newest stay."""
    checkpoint.save(state, checkpoint_id=FOLDER / str(next_step))
    if RANK == 0:
        fresh = FOLDER / "newest.new"
        fresh.write_text(str(next_step), "utf-8")
        fresh.replace(NEWEST)
        shutil.rmtree(FOLDER / str(next_step - 2), ignore_errors=True)


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint in place and return the step to go on with."""
    if not NEWEST.exists():
        return 0
    next_step = int(NEWEST.read_text("utf-8"))
    job.fill_optimizer(model, optimizer)
    checkpoint.load(dict(job.named_state(model, optimizer)), checkpoint_id=FOLDER / str(next_step))
    return next_step


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    FOLDER.mkdir(exist_ok=True)
    model, optimizer = job.build_model()
    timeout = timedelta(seconds=PLAN.gloo_timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    next_step = restore(model, optimizer)
    wrapped = DistributedDataParallel(model)
    own = range(RANK * NUM_BATCHES // WORLD, (RANK + 1) * NUM_BATCHES // WORLD)
    for step in range(next_step, PLAN.num_steps):
        for number in own:
            loss = job.compute_loss(wrapped, job.draw_batch(number, step, NUM_BATCHES))
            (loss * WORLD / NUM_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        LOG.write("committed", RANK, step=step, loss=job.loss_bits(loss.detach()), world=WORLD)
        save(dict(job.named_state(model, optimizer)), step + 1)


main()

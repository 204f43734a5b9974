"""One rank under an elastic torchrun: DDP at the size that there is, checkpoints as the plan says.

After a change of size torchrun ends all ranks and starts them again at the new one; they load the
newest checkpoint. A global batch has the same samples at any size, as far as it divides.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

from benchmarks.events import EventLog
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOG.write("started", RANK)

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402
from benchmarks.recovery_peers.newest_checkpoint import NewestCheckpoint  # noqa: E402

NUM_BATCHES = 12
"""Micro batches of a step, whatever the number of ranks."""


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    newest = NewestCheckpoint(PLAN)
    model, optimizer = job.build_model()
    timeout = timedelta(seconds=PLAN.gloo_timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    next_step = newest.restore(model, optimizer)
    LOG.write("restored", RANK, step=next_step)
    wrapped = DistributedDataParallel(model)
    own = range(RANK * NUM_BATCHES // WORLD, (RANK + 1) * NUM_BATCHES // WORLD)
    for step in range(next_step, PLAN.num_steps):
        for number in own:
            is_last = number == own[-1]
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                loss = job.compute_loss(wrapped, job.draw_batch(number, step, NUM_BATCHES))
                (loss * WORLD / NUM_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        LOG.write("committed", RANK, step=step, loss=job.loss_bits(loss.detach()), world=WORLD)
        newest.save(model, optimizer, step + 1)


main()

"""One rank under torchrun: DDP, and a distributed checkpoint in memory every few steps.

After a fault torchrun ends all ranks and starts them again; they load the newest checkpoint.
"""

from __future__ import annotations

import os

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK = int(os.environ["RANK"])
LOG.write("started", RANK)

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402
from benchmarks.recovery_peers.newest_checkpoint import NewestCheckpoint, open_group  # noqa: E402

LOG.write("imported", RANK)


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    newest = NewestCheckpoint(PLAN)
    model, optimizer = job.build_model()
    open_group(PLAN)
    LOG.write("joined", RANK)
    next_step = newest.restore(model, optimizer)
    LOG.write("restored", RANK, step=next_step)
    wrapped = DistributedDataParallel(model)
    injector = FaultInjector(PLAN, LOG)
    for step in range(next_step, PLAN.num_steps):
        loss = job.compute_loss(wrapped, job.draw_batch(RANK, step, PLAN.num_ranks))
        injector.fire(RANK, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        LOG.write(
            "committed", RANK, step=step, loss=job.loss_bits(loss.detach()), world=PLAN.num_ranks
        )
        newest.save(model, optimizer, step + 1)
    LOG.write("finished", RANK, digest=job.state_digest(model, optimizer))
    dist.barrier()
    dist.destroy_process_group()


main()

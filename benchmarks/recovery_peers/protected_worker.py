"""One rank under the node agent, by the public way: the same job under `resilience.protect`."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilience
from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector, strike_process
from benchmarks.jobplan import read_plan
from benchmarks.recovery_peers import job

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)


def main() -> None:
    """Train to the planned step."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    core, optimizer = job.build_model()
    model = DistributedDataParallel(core)
    batches = [job.draw_batch(rank, step, PLAN.num_ranks) for step in range(PLAN.num_steps)]
    injector = FaultInjector(PLAN, LOG, strike_process)
    run = resilience.protect(model, optimizer)
    LOG.write("restored", rank)
    for batch in run.steps(batches, until=PLAN.num_steps):
        step = run.index
        with run.step():
            loss = job.compute_loss(model, batch)
            injector.fire(rank, step)
            loss.backward()
            optimizer.step()
            injector.fire(rank, step, "update")
            bits = job.loss_bits(loss.detach())
        if run.index > step:
            LOG.write("committed", rank, step=step, loss=bits, world=world)
    LOG.write("finished", rank, digest=job.state_digest(core, optimizer))


if __name__ == "__main__":
    main()

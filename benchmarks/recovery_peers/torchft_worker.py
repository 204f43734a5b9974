"""One replica group of one rank under torchft; the driver starts a dead one again.

The others redo the faulted step without the dead group, which takes its state from one of them
over HTTP when it is back. What it would have trained meanwhile is never trained.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK = int(os.environ["RANK"])
LOG.write("started", RANK)

import torch.distributed as dist  # noqa: E402
from torchft import (  # noqa: E402
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from benchmarks.recovery_peers import job  # noqa: E402

GROUPS_MIN = 2

LOG.write("imported", RANK)


def main() -> None:
    """Train until the groups together have reached the planned step."""
    logging.basicConfig(level=logging.WARNING)
    model, optimizer = job.build_model()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def take_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        LOG.write("healed", RANK)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=PLAN.gloo_timeout_s)),
        load_state_dict=take_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=GROUPS_MIN,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        replica_id=f"group-{RANK}-",
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    LOG.write("joined", RANK)
    wrapped = DistributedDataParallel(manager, model)
    voting = Optimizer(manager, optimizer)
    injector = FaultInjector(PLAN, LOG)
    while manager.current_step() < PLAN.num_steps:
        step = manager.current_step()
        voting.zero_grad()
        loss = job.compute_loss(wrapped, job.draw_batch(RANK, step, PLAN.num_ranks))
        injector.fire(RANK, step)
        loss.backward()
        voting.step()
        done = manager.current_step() - 1
        if done < step:
            LOG.write("discarded", RANK, step=step)
            continue
        LOG.write(
            "committed",
            RANK,
            step=done,
            loss=job.loss_bits(loss.detach()),
            world=manager.num_participants(),
        )
    LOG.write("finished", RANK, digest=job.state_digest(model, optimizer))
    manager.shutdown(wait=False)


main()
os._exit(0)

"""One rank under torchrun: DDP, and a distributed checkpoint in memory every few steps.

After a fault torchrun ends all ranks and starts them again; they load the newest checkpoint.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK = int(os.environ["RANK"])
LOG.write("started", RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402

FOLDER = Path(PLAN.run_dir, "checkpoints")
NEWEST = FOLDER / "newest"

LOG.write("imported", RANK)


def open_group() -> None:
    """Open the group under a prefix of this attempt.

    Without it ranks meet the gloo addresses of the attempt before, since torch 2.13 keeps one
    store for all of them and a restart then often never comes up.
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(address, port, is_master=False))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=RANK,
        world_size=PLAN.num_ranks,
        timeout=timedelta(seconds=PLAN.gloo_timeout_s),
    )


def save(state: dict[str, torch.Tensor], next_step: int) -> None:
    """Write a checkpoint, and name it the newest once it is whole; the two newest stay."""
    checkpoint.save(state, checkpoint_id=FOLDER / str(next_step))
    if RANK == 0:
        fresh = FOLDER / "newest.new"
        fresh.write_text(str(next_step), "utf-8")
        fresh.replace(NEWEST)
        old = FOLDER / str(next_step - 2 * PLAN.checkpoint_every)
        shutil.rmtree(old, ignore_errors=True)


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint in place and return the step to go on with."""
    if not NEWEST.exists():
        return 0
    next_step = int(NEWEST.read_text("utf-8"))
    job.fill_optimizer(model, optimizer)
    state = dict(job.named_state(model, optimizer))
    checkpoint.load(state, checkpoint_id=FOLDER / str(next_step))
    return next_step


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    FOLDER.mkdir(exist_ok=True)
    model, optimizer = job.build_model()
    open_group()
    LOG.write("joined", RANK)
    next_step = restore(model, optimizer)
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
        if (step + 1) % PLAN.checkpoint_every == 0:
            save(dict(job.named_state(model, optimizer)), step + 1)
    LOG.write("finished", RANK, digest=job.state_digest(model, optimizer))
    dist.barrier()
    dist.destroy_process_group()


main()

"""One rank under the in-process wrapper of nvidia-resiliency-ext; rank 0 writes checkpoints.

With the argument "fast" at its fastest safe settings, else at its defaults. A killed rank is
not replaced: the others go on without it, under new ranks.
"""

# Annotations stay objects here: the wrapper looks at them for the argument that it fills in.
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
FIRST_RANK = int(os.environ["RANK"])
LOG.write("started", FIRST_RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from nvidia_resiliency_ext import inprocess  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402

CHECKPOINT = Path(PLAN.run_dir, "checkpoint.pt")

LOG.write("imported", FIRST_RANK)


def fastest_settings() -> dict[str, Any]:
    """Return intervals of 10 ms and no last call.

    The hard time-out stays above gloo's: below it the monitor processes kill healthy ranks
    that only wait for the faulted one.
    """
    tick = timedelta(milliseconds=10)
    return {
        "monitor_thread_interval": tick,
        "monitor_process_interval": tick,
        "heartbeat_interval": tick,
        "progress_watchdog_interval": tick,
        "last_call_wait": timedelta(0),
        "heartbeat_timeout": timedelta(seconds=PLAN.gloo_timeout_s),
        "soft_timeout": timedelta(seconds=PLAN.gloo_timeout_s + 3),
        "hard_timeout": timedelta(seconds=PLAN.gloo_timeout_s + 6),
        "termination_grace_time": timedelta(milliseconds=200),
    }


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return the step to go on with."""
    if not CHECKPOINT.exists():
        return 0
    saved = torch.load(CHECKPOINT, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["next_step"])


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, next_step: int) -> None:
    """Replace the checkpoint by one of now."""
    fresh = CHECKPOINT.with_suffix(".new")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_step": next_step},
        fresh,
    )
    fresh.replace(CHECKPOINT)


def train(
    store: dist.Store,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    call: Optional[inprocess.CallWrapper] = None,  # noqa: UP045
) -> None:
    """Train from the checkpoint to the planned step; called again after each fault."""
    assert call is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"call-{call.iteration}", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PLAN.gloo_timeout_s),
    )
    LOG.write("joined", rank, world=world)
    optimizer.zero_grad(set_to_none=True)
    next_step = restore(model, optimizer)
    LOG.write("restored", rank, step=next_step)
    wrapped = DistributedDataParallel(model)
    injector = FaultInjector(PLAN, LOG)
    for step in range(next_step, PLAN.num_steps):
        loss = job.compute_loss(wrapped, job.draw_batch(rank, step, PLAN.num_ranks))
        injector.fire(rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        LOG.write("committed", rank, step=step, loss=job.loss_bits(loss.detach()), world=world)
        if rank == 0 and (step + 1) % PLAN.checkpoint_every == 0:
            with call.atomic():
                save(model, optimizer, step + 1)
    LOG.write("finished", rank, digest=job.state_digest(model, optimizer))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Wrap the training and run it."""
    model, optimizer = job.build_model()
    store = dist.TCPStore(
        "127.0.0.1",
        PLAN.ports[1],
        PLAN.num_ranks,
        is_master=FIRST_RANK == 0,
        wait_for_workers=True,
        multi_tenant=True,
    )
    settings = fastest_settings() if "fast" in sys.argv[1:] else {}
    wrapper = inprocess.Wrapper(store_kwargs={"port": PLAN.ports[0]}, **settings)
    wrapper(train)(store, model, optimizer)


main()

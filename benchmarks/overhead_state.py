"""One rank with a large state, for its memory: under DDP, as the trainer is without recovery.

Run by `benchmarks.overhead_memory`; `overhead_recovered` is the same with recovery.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.events import EventLog
from benchmarks.jobplan import JobPlan, read_plan

WIDTH, ROWS = 2048, 8
BYTES_PER_VALUE = 12
"""A float32 parameter and its two moments."""


def build(gib: float) -> nn.Module:
    """Return layers with memory that nobody has touched yet."""
    torch.set_num_threads(1)
    depth = max(1, round(gib * 2**30 / BYTES_PER_VALUE / WIDTH**2))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))
    return model.to_empty(device="cpu")


def fill(model: nn.Module) -> None:
    """Set the first weights, the same on all ranks."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02, generator=draw)


def draw_batch(rank: int, step: int, num_ranks: int) -> Tensor:
    """Return a rank's batch."""
    draw = torch.Generator().manual_seed(step * num_ranks + rank)
    return torch.randn(ROWS, WIDTH, generator=draw)


def run_plain(gib: float, plan: JobPlan, log: EventLog) -> None:
    """Train as the trainer does without recovery."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    log.write("joined", rank)
    model = build(gib)
    fill(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        run = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    for step in range(plan.num_steps):
        loss = run(draw_batch(rank, step, plan.num_ranks)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.write("committed", rank, step=step, loss=loss.item(), world=plan.num_ranks)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Run this rank until all ranks have finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, required=True)
    options = parser.parse_args()
    plan = read_plan()
    run_plain(options.gib, plan, EventLog(plan.run_dir))


if __name__ == "__main__":
    main()
    sys.stdout.flush()

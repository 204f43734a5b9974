"""One rank that takes steps of two copies in turn: one as torch has it, one under `protect`.

Run by `benchmarks.overhead` under the node agent. Each step begins after a barrier. A protected one
lasts from the request for its batch to the end of its block, but for the other copy's turn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import resilience
from benchmarks.jobplan import read_plan
from benchmarks.recovery_peers import job


def make_copy(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a wrapped model and its optimizer, over groups that are made now."""
    core, optimizer = job.build_model(num_hidden_layers={"ddp": 12, "fsdp": 5}[layout])
    if layout == "ddp":
        return DistributedDataParallel(core, process_group=dist.new_group()), optimizer
    sizes = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards"))
    for layer in core.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(core, mesh=mesh)
    return core, torch.optim.AdamW(core.parameters(), lr=1e-3)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Take a step; return the loss."""
    loss = job.compute_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Take all pairs of steps and write what they showed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    options = parser.parse_args()
    plan = read_plan()
    dist.init_process_group("gloo")
    rank, num_steps = dist.get_rank(), options.warm_up + options.pairs
    model, optimizer = make_copy(options.layout)
    batches = [job.draw_batch(rank, step, plan.num_ranks) for step in range(num_steps)]
    run = resilience.protect(model, optimizer)
    # After the set-up: its groups are torch's own.
    whole = dist.new_group()
    plain, plain_optimizer = make_copy(options.layout)
    turns = random.Random(job.SEED)
    notes: dict[str, list[Any]] = {"plain": [], "ours": []}
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    left_s = time.monotonic()
    for batch in run.steps(batches, until=num_steps):
        asked_s = time.monotonic() - left_s
        order = ["plain", "ours"]
        turns.shuffle(order)
        for name in order:
            dist.barrier(whole)
            began_s = time.monotonic()
            if name == "plain":
                losses[name].append(take_step(plain, plain_optimizer, batch))
            else:
                with run.step():
                    losses[name].append(take_step(model, optimizer, batch))
                began_s -= asked_s
            notes[name].append([began_s, time.monotonic()])
        left_s = time.monotonic()
    early = [losses[name][: options.warm_up] for name in notes]
    difference = max(abs(one - other) for one, other in zip(*early, strict=True))
    found = {name: each[options.warm_up :] for name, each in notes.items()}
    text = json.dumps({"rank": rank, **found, "loss_difference": difference})
    Path(plan.run_dir, f"steps-{rank}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()

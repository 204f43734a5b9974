"""Trains a small network with plain torch DDP, on CPUs with gloo or on GPUs with NCCL.

Each 20 steps rank 0 writes a checkpoint; a start that finds one goes on from it. One line tells the
run its steps: `torchrun --nproc-per-node=2 examples/torch_ddp.py` trains it too, and prints them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="longer steps, to watch")
    parser.add_argument("--checkpoint", type=Path, help="default: torch_ddp.pt in the run's folder")
    options = parser.parse_args()
    # A run's folder is there for each start of it; without a launcher it is the current one.
    run_dir = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
    checkpoint = options.checkpoint or run_dir / "torch_ddp.pt"
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    core = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(core)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    first = load(checkpoint, core, optimizer, device)
    for step in range(first, options.steps):
        # The samples of a step are the same whenever it is taken.
        random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        samples = torch.randn(32, 16, generator=random).to(device)
        loss = nn.functional.mse_loss(model(samples), samples.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.step_seconds)
        if dist.get_rank() == 0:
            resilience.log(step + 1, loss=loss.item(), lr=options.lr)
            if (step + 1) % options.save_every == 0:
                save(checkpoint, step + 1, core, optimizer)
    dist.destroy_process_group()


def load(
    path: Path, core: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Take the state of a checkpoint over, and return the steps that it has; 0 without one."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=device, weights_only=True)
    core.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if dist.get_rank() == 0:
        print(f"goes on after step {state['step']}", flush=True)
    return int(state["step"])


def save(path: Path, step: int, core: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint that is there whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    torch.save({"step": step, "model": core.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


if __name__ == "__main__":
    main()

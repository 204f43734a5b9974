"""FSDP2 in plain PyTorch: a small network, sharded over all ranks, with checkpoints by DCP.

Every 20 steps all ranks write their parts; a start goes on from the newest that is whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import resilience

RUN_DIR = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
"""The folder of the run: all its starts see it. Without a launcher, the current one."""


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that all ranks have written."""
    found = [each for each in folder.glob("step-*") if (each / ".metadata").exists()]
    return max(found, key=lambda each: int(each.name.removeprefix("step-")), default=None)


def main() -> None:
    """Train; arguments are the number of steps, the learning rate, and where checkpoints go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=RUN_DIR / "checkpoints")
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
    ).to(device)
    teacher = nn.Linear(64, 8).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    first = 0
    if (checkpoint := newest(options.out)) is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"weights": weights, "moments": moments, "step": 0}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"]
        )
        first = state["step"]
        if rank == 0:
            print(f"goes on from step {first}", flush=True)

    for step in range(first + 1, options.steps + 1):
        torch.manual_seed(step * 1000 + rank)
        samples = torch.randn(32, 64, device=device)
        loss = nn.functional.mse_loss(model(samples), teacher(samples))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resilience.log(step, loss.detach(), lr=options.lr)
        if step % 20 == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"weights": weights, "moments": moments, "step": step}
            before, folder = newest(options.out), options.out / f"step-{step}"
            dcp.save(state, checkpoint_id=folder)
            if rank == 0 and before is not None:
                shutil.rmtree(before)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

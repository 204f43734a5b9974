"""A loop with Hugging Face's accelerate, which finds its ranks in the environment.

A checkpoint every 20 steps; a start goes on from the newest that was written to its end.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resilience

RUN_DIR = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
"""The folder of the run: all its starts see it. Without a launcher, the current one."""


def main() -> None:
    """Train; arguments are the number of steps, the learning rate, and where checkpoints go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=RUN_DIR / "checkpoints")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    samples = torch.randn(8192, 64)
    data = TensorDataset(samples, samples @ torch.randn(64, 8))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=16, shuffle=True)
    )

    step, done = 0, options.out / "newest"
    if done.exists():
        step = int(done.read_text())
        accelerator.load_state(str(options.out / f"step-{step}"))
        accelerator.print(f"goes on from step {step}")
    while step < options.steps:
        epoch, skipped = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, skipped):
            step += 1
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            resilience.log(step, loss.detach(), lr=options.lr)
            if step % 20 == 0:
                accelerator.save_state(str(options.out / f"step-{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    before = done.read_text() if done.exists() else None
                    done.with_suffix(".new").write_text(str(step))
                    done.with_suffix(".new").replace(done)
                    if before not in (None, str(step)):
                        shutil.rmtree(options.out / f"step-{before}", ignore_errors=True)
            if step == options.steps:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

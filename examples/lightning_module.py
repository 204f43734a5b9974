"""A LightningModule under Lightning's Trainer, which finds its ranks as under torchrun.

Lightning writes a checkpoint every 20 steps; a start goes on from it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import resilience

RUN_DIR = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
"""The folder of the run: all its starts see it. Without a launcher, the current one."""


class Regression(lightning.LightningModule):
    """A small network that learns a linear map."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        resilience.log(self.global_step + 1, loss.detach(), lr=self.lr)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of all weights."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Train; arguments are the number of steps, the learning rate, and where checkpoints go."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=RUN_DIR / "checkpoints")
    options = parser.parse_args()

    info = resilience.rank_info()
    torch.manual_seed(0)
    samples = torch.randn(4096, 64)
    data = TensorDataset(samples, samples @ torch.randn(64, 8))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=info.local_world_size,
        num_nodes=info.num_nodes,
        strategy="ddp" if info.world_size > 1 else "auto",
        max_steps=options.steps,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath=options.out, every_n_train_steps=20, save_last=True)],
    )
    newest = options.out / "last.ckpt"
    trainer.fit(
        Regression(options.lr),
        DataLoader(data, batch_size=16, shuffle=True),
        ckpt_path=newest if newest.exists() else None,
        weights_only=False,
    )


if __name__ == "__main__":
    main()

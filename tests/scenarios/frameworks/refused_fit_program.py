"""Prints what a fit with each of many settings is refused with."""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[3].glob(".venv-frameworks/lib/*/site-packages")))

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader

from resilience.errors import StateError
from resilience.frameworks import lightning_refusals
from resilience.frameworks.lightning import RecoveringDDPStrategy


class ByClosure(BoringModel):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Iterating(BoringModel):
    def training_step(self, dataloader_iter):
        raise AssertionError


class EndingEpoch(BoringModel):
    def on_train_batch_start(self, batch, number):
        return -1


class ByHand(BoringModel):
    automatic_optimization = False
    steps = False

    def training_step(self, batch, number):
        self.manual_backward(super().training_step(batch, number)["loss"])
        if self.steps:
            self.optimizers().step()
            self.manual_backward(super().training_step(batch, number)["loss"])
            self.optimizers().step()


class Twice(ByHand):
    steps = True


def fit(model=None, loader=None, strategy=None, **options):
    rows = DataLoader(RandomDataset(32, 8))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=RecoveringDDPStrategy(**(strategy or {})),
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=False,
        max_epochs=1,
        **options,
    )
    try:
        trainer.fit(model or BoringModel(), rows if loader is None else loader, rows)
    except StateError as error:
        return str(error)
    return "not refused"


found = {
    "precision": fit(precision="64-true"),
    "checkpoints": fit(strategy={"checkpoint_io": TorchCheckpointIO()}),
    "profiler": fit(profiler="simple"),
    "reload": fit(reload_dataloaders_every_n_epochs=1),
    "interval": fit(val_check_interval=timedelta(hours=1), check_val_every_n_epoch=None),
    "time": fit(max_time=timedelta(hours=1)),
    "callback": fit(callbacks=[callbacks.StochasticWeightAveraging(0.1)]),
    "link": fit(callbacks=[callbacks.ModelCheckpoint(save_last="link")]),
    "optimizer": fit(ByClosure()),
    "loaders": fit(loader=[DataLoader(RandomDataset(32, 8))] * 2),
    "length": fit(loader=DataLoader(RandomIterableDataset(32, 8))),
    "iterator": fit(Iterating()),
    "epoch": fit(EndingEpoch()),
    "no step": fit(ByHand()),
    "two steps": fit(Twice()),
}
lightning_refusals.VERSIONS = ("2.5.",)
found["version"] = fit()
sys.stdout.write(json.dumps(found) + "\n")

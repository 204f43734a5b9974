"""Lightning's Trainer: dropout, two workers, accumulation with a rest, validation, saves, logs."""

import json
import os
import sys
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[3].glob(".venv-frameworks/lib/*/site-packages")))

import lightning
import torch
import torchmetrics  # noqa: F401 - for a program that has found it here
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resilience.frameworks import lightning as ours

sys.path.insert(1, str(Path(__file__).parents[1] / "protection"))
from faults import OUT, Faults, digest_state

FAULTS = Faults()
NOISE = float(os.environ.get("NOISE", "0.1"))
RANK = os.environ.get("RANK", "0")


class FaultyRun(ours._FitRun):
    def __init__(self, loop):
        optimizer = loop.trainer.optimizers[0]
        FAULTS.watch(loop.trainer.strategy.model, optimizer)
        super().__init__(loop)
        FAULTS.follow(self, optimizer)


ours._FitRun = FaultyRun


class Rows(Dataset):
    def __init__(self, number: int, seed: int) -> None:
        self.rows = torch.randn(number, 16, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[index] + torch.rand(16) * NOISE
        return row, row.square().sum(-1, keepdim=True)


class Notes(Callback):
    """Writes the calls of the callbacks down."""

    num_ends = 0

    def write(self, event, trainer, *values):
        with (OUT / f"calls-{RANK}").open("a") as file:
            file.write(json.dumps([event, trainer.global_step, *values]) + "\n")

    def on_train_epoch_start(self, trainer, module):
        self.write("epoch_start", trainer)

    def on_train_batch_start(self, trainer, module, batch, number):
        self.write("batch_start", trainer, number)
        module.log("noted", float(number), on_epoch=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.num_ends += 1
        self.write("batch_end", trainer, number)

    def on_validation_end(self, trainer, module):
        FAULTS.reach("validated")
        self.write("validation_end", trainer)

    def on_train_epoch_end(self, trainer, module):
        FAULTS.reach("epoch_end")
        self.write("epoch_end", trainer)


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(NOISE), nn.Linear(32, 1)
        )
        self.num_losses, self.outputs = 0, []

    def training_step(self, batch, number):
        FAULTS.reach("training_step")
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.num_losses += 1
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_gradient_clipping(self, *given, **named):
        FAULTS.reach("clip")
        super().configure_gradient_clipping(*given, **named)

    def validation_step(self, batch, number):
        FAULTS.reach("validation_step")
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.outputs.append(loss)
        self.log("val_loss", loss, sync_dist=True)
        self.log("own_val_loss", loss)

    def on_validation_epoch_end(self):
        self.log("all_val", torch.stack(self.outputs).sum(), sync_dist=True)
        self.outputs.clear()

    def on_save_checkpoint(self, checkpoint):
        FAULTS.reach("save")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Strategy(ours.RecoveringDDPStrategy):
    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        super().save_checkpoint(checkpoint, filepath, storage_options)
        FAULTS.reach("saved")


def main(
    make: type[Model] = Model, callbacks=(), validates_first: bool = False, **options: object
) -> None:
    torch.manual_seed(0)
    model = make()
    saves = ModelCheckpoint(
        dirpath=OUT / "trained",
        monitor="val_loss",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=4,
        filename="{step}",
    )
    ends = ModelCheckpoint(
        dirpath=OUT / "trained", filename="end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    known = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        "strategy": "ddp" if "PLAIN" in os.environ else Strategy(),
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 2,
        "val_check_interval": 4,
        "enable_progress_bar": False,
        "logger": CSVLogger(OUT / "logs"),
        "callbacks": [Notes(), *callbacks, saves, ends],
    }
    trainer = lightning.Trainer(**{**known, **options})
    if validates_first:
        trainer.validate(model, DataLoader(Rows(32, 2), batch_size=4), verbose=False)
    trainer.fit(
        model,
        DataLoader(Rows(144, 1), batch_size=4, shuffle=True, num_workers=2),
        DataLoader(Rows(32, 2), batch_size=4, num_workers=1, persistent_workers=True),
        ckpt_path=os.environ.get("RESUME"),
        weights_only=False,
    )
    told = {} if FAULTS.run is None else digest_state(FAULTS.run)
    told |= {
        "step": trainer.global_step,
        "losses": model.num_losses,
        "epoch": trainer.current_epoch,
    }
    told |= {"loops": json.dumps(trainer.fit_loop.state_dict(), default=str)}
    told |= {"metrics": {key: float(each) for key, each in trainer.callback_metrics.items()}}
    told |= {
        "best": saves.best_model_path[-20:],
        "kept": sorted(k[-20:] for k in saves.best_k_models),
    }
    (OUT / f"end-{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

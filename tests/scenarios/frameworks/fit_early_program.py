"""The same with a stop by a callback, a plateau's scheduler, a bar and workers that last."""

import torch
from fit_program import Model, main
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor


class Plateau(Model):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-5, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "synced"}}


main(
    Plateau,
    [EarlyStopping("loss_epoch", patience=2, mode="max"), LearningRateMonitor("step")],
    max_epochs=20,
    val_check_interval=1.0,
    check_val_every_n_epoch=2,
    limit_train_batches=6,
    enable_progress_bar=True,
    log_every_n_steps=1,
)

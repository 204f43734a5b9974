"""The same by hand: two optimizers, which step after one backward pass."""

import torch
from fit_program import FAULTS, Model, main


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, number):
        FAULTS.reach("training_step")
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.num_losses += 1
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 1.0, "norm")
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        parts = self.layers[:2], self.layers[2:]
        made = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in parts]
        return made, [torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=40) for each in made]


main(Manual, accumulate_grad_batches=1, gradient_clip_val=None)

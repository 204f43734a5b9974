"""The same with metrics of torchmetrics, lower precision, and validations within a step."""

from fit_program import Model, main, torchmetrics


class More(Model):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.val_error = torchmetrics.MeanAbsoluteError()

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.error(self.layers(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        super().validation_step(batch, number)
        self.val_error(self.layers(batch[0]), batch[1])
        self.log("val_error", self.val_error)

    def on_train_epoch_start(self):
        self.log("began", 1.0 * self.current_epoch, sync_dist=True)


main(More, val_check_interval=3, precision="bf16-mixed")

"""The same with a validation before it, and a module that stops where nothing else is due."""

from fit_program import Model, main


class Stopping(Model):
    def on_train_batch_end(self, outputs, batch, number):
        self.trainer.should_stop |= self.trainer.global_step == 6


main(
    Stopping,
    validates_first=True,
    val_check_interval=1.0,
    log_every_n_steps=7,
    min_epochs=1,
)

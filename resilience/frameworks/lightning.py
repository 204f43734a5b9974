"""Lightning's Trainer, whose fit goes on through faults.

    trainer = Trainer(strategy=RecoveringDDPStrategy(), ...)

in place of `strategy="ddp"` is all that a program changes. Lightning's own loops compute, log,
validate and save as ever. The loop that calls them is that of `resilience.protect`.
"""

# ruff: noqa: SLF001 - Lightning has no public way into its loops

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from resilience.errors import StateError
from resilience.frameworks.lightning_calls import HookCalls
from resilience.frameworks.lightning_files import WholeCheckpointIO, keep_logs, keep_resume
from resilience.frameworks.lightning_refusals import refuse
from resilience.frameworks.lightning_state import FitProgress
from resilience.inprocess.lasting import current_set_up
from resilience.protection.run import Run


class RecoveringDDPStrategy(DDPStrategy):  # type: ignore[misc]
    """DDP whose training goes on through faults, under an agent that recovers.

    Without such an agent its first fault ends it, and the bits are the same. Raises StateError for
    what is not kept exact, with the remedy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"checkpoint_io": WholeCheckpointIO(), **options})

    def setup_environment(self) -> None:
        """Set up the process, and have it resume and log where a lost one did."""
        if self.root_device.type != "cpu":
            raise StateError("training on GPUs is not kept exact so far; take accelerator='cpu'")
        super().setup_environment()
        atexit.register(_destroy_dist_connection)  # else a thread of gloo's may abort the exit
        trainer = self.lightning_module.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting or current_set_up() is not None:
            keep_logs(trainer)
        if is_fitting:
            keep_resume(trainer)
            trainer.fit_loop.__class__ = _RecoveringFitLoop

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any
    ) -> Any:
        """Compute gradients, then step: torch would ask for all ranks' agreement before it did."""
        module = model or self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)
        optimizer.step(**named)
        return result

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: the reducer of DDP, which manual optimization would prepare, is gone."""

    def teardown(self) -> None:
        """Unwrap the model, and do what follows a training."""
        self.model = self.lightning_module  # DDP's logger, which its teardown reads, is gone
        super().teardown()


class _RecoveringFitLoop(_FitLoop):  # type: ignore[misc]
    """Lightning's loop over epochs, whose steps are those of a protected run."""

    def run(self) -> None:
        """Train up to the last epoch."""
        self.setup_data()
        if self.skip:
            return
        refuse(self.trainer)
        self._data_fetcher.teardown()
        self._data_fetcher: Any = None
        self.reset()
        self.on_run_start()
        _FitRun(self).train()
        self.on_run_end()


class _EpochData:
    """The batches of an epoch, up to the Trainer's limit, as Lightning's loop takes them."""

    def __init__(self, fit: _RecoveringFitLoop) -> None:
        self._combined, self._num_batches = fit._combined_loader, fit.max_batches
        self.base_dataloader = fit._combined_loader.flattened[0]

    def __iter__(self) -> Any:
        combined = iter(self._combined)
        return (next(combined) for _ in range(self._num_batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)


class _FitRun(Run):
    """The steps of one call of a Trainer's fit()."""

    _keeps_rest = _shares_seeds = True

    def __init__(self, loop: _RecoveringFitLoop) -> None:
        self._fit, self._epoch, self._trainer = loop, loop.epoch_loop, loop.trainer
        trainer, self._accumulate = loop.trainer, loop.trainer.accumulate_grad_batches
        # An agent ends all ranks: they do not have to agree on that.
        self._epoch._broadcast_sigterm_tensor = lambda: None
        position = self._restore_place()
        self._calls = HookCalls(trainer, self._needs_all)
        self._progress = FitProgress(trainer, self._calls)
        also = [*(each.scheduler for each in trainer.lr_scheduler_configs), self._progress]
        super().__init__(trainer.strategy.model, trainer.optimizers, also, seed=0, ignore=())
        step, epoch = self._epoch._batches_that_stepped, loop.epoch_progress.current.processed
        cursor = {"step": step, "epoch": epoch, "position": position}
        self.load_state_dict({"step": step, "cursor": cursor if step else {}})

    def _restore_place(self) -> int:
        """End the batch, and the epoch, within which a checkpoint was saved.

        Return how many batches of the epoch it has seen.
        """
        fit, epoch, position = self._fit, self._epoch, 0
        if fit.restarted_mid_epoch:
            epoch.reset()
            with suppress(StopIteration):
                if epoch._should_check_val_fx(None):
                    epoch.advance(iter(()))
                    epoch.on_advance_end(None)
            if epoch._num_ready_batches_reached():
                fit.on_advance_end()
            else:
                position = epoch.batch_progress.current.ready
            if position % self._accumulate:
                raise StateError(
                    f"the checkpoint was saved after {position} batches of an epoch, in the midst "
                    f"of a step of {self._accumulate}; resume from one that was saved after a step"
                )
        elif fit.restarted_on_epoch_end:
            fit.epoch_progress.increment_completed()
        for loop in (fit, epoch, epoch.val_loop):
            loop.on_iteration_done()
        return position

    def train(self) -> None:
        """Take all steps."""
        fit, trainer = self._fit, self._trainer
        data, until = _EpochData(fit), trainer.estimated_stepping_batches
        try:
            if fit.done:
                return
            for found in self.steps(data, until=until, accumulate=self._accumulate):
                with self.step():
                    self._take_step(found if self._accumulate > 1 else [found])
        finally:
            self._calls.restore()

    def _begin_part(self, part: str, step: int) -> None:
        """Leave behind what a broken try has left in the Trainer."""
        self._trainer.training = True
        self._trainer.lightning_module.__dict__.pop("forward", None)
        self._trainer.strategy.model.require_backward_grad_sync = True
        for loader in getattr(self._epoch.val_loop._combined_loader, "flattened", ()):
            # An iterator that is used again draws less than a new process's.
            loader._iterator = None
        self._progress.begin_part()
        self._calls.begin_part(part, step)

    def _take_step(self, batches: Sequence[Any]) -> None:
        epoch, calls = self._epoch, self._calls
        self._begin_part("step", self.index)
        position, num_before = self.state.cursor["position"], epoch.global_step
        if not position:
            self._fit.on_advance_start()
            epoch.reset()
        fetcher = _DataFetcher()
        fetcher.length, fetcher.fetched = self._fit.max_batches, position
        fetcher.iterator = iter(batches)
        try:
            for _ in batches:
                epoch.advance(fetcher)
                if epoch._should_accumulate():
                    epoch.on_advance_end(fetcher)
        except StopIteration as error:
            raise StateError("on_train_batch_start: -1 is not kept; set should_stop") from error
        # A hook of the module has been called since.
        is_deferred = calls.is_deferred or self._needs_all()
        self._progress.note_step(is_deferred=is_deferred)
        if not is_deferred:
            epoch.on_advance_end(fetcher)
        if epoch.global_step == num_before:
            raise StateError("no optimizer.step() in training_step: accumulate by the Trainer")
        if self._trainer._logger_connector.should_update_logs and "loss" in calls.output:
            self.log(loss=calls.output["loss"])

    def _end_step(self, step: int) -> None:
        """Validate, save and log what is due after a step, and end its epoch."""
        fit, epoch = self._fit, self._epoch
        self._begin_part("end of a step", step)
        if self._progress.is_deferred:
            self._calls.call_deferred(epoch.batch_progress)
            epoch.on_advance_end(None)
        if epoch.done:
            fit.on_advance_end()
            if step < self._until and fit.done:
                self.stop()
        with self._progress.share():
            pass
        self._calls.deliver_lines()

    def _needs_all(self) -> bool:
        """Return whether a step's end may communicate: it validates, saves, logs or stops."""
        trainer, epoch = self._trainer, self._epoch
        return bool(
            trainer._logger_connector.should_update_logs
            or trainer.fast_dev_run
            or epoch._should_check_val_fx(None)
            or epoch.done
            or any(
                each.reduce_on_plateau and each.interval == "step"
                for each in trainer.lr_scheduler_configs
            )
            or any(
                every and epoch.global_step % every == 0
                for every in map(_save_every, trainer.checkpoint_callbacks)
            )
        )

    # ---- what a run asks

    def _find_due(self, step: int) -> list[Callable[[int], object]]:
        is_due = step and (self._progress.is_deferred or self._epoch.done)
        return [self._end_step] if is_due else []

    def _share(self) -> None:
        with self._progress.share():
            super()._share()

    def _check_collective(self, name: str) -> None:
        if self._calls.is_calling:
            self._refuse(
                f"{name} in a callback, which a new process may call alone; use the module"
            )
        super()._check_collective(name)


def _save_every(callback: Any) -> int:
    """Return after how many steps a checkpoint may be saved; 0 where epochs or validations do."""
    every: int = getattr(callback, "_every_n_train_steps", 1)
    return every

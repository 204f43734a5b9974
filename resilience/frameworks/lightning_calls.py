"""Calls of a Lightning Trainer's callbacks and loggers, each once, where a step is run again."""

# ruff: noqa: SLF001 - Lightning has no public way to call its callbacks otherwise

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

from resilience.frameworks.calls_once import CallsOnce


class HookCalls(CallsOnce):
    """Stands between a Trainer and its callbacks; made for one call of fit().

    Checkpoint and EarlyStopping communicate: each try calls them again, after the others. Another
    callback is called once: a second try logs its values again, and restores its wish to stop the
    training.
    """

    def __init__(self, trainer: Any, needs_all: Callable[[], bool]) -> None:
        super().__init__()
        self._trainer, self._needs_all = trainer, needs_all
        self.is_deferred = False
        """Checkpoints, stops and lines that a step has due wait until it counts."""
        self.output: Any = {}
        """The last value that training_step has returned."""
        self._calls: list[Callable[[], object]] = []
        """Values that the callbacks which are being called have logged."""
        self._log_step = trainer._logger_connector.update_train_step_metrics
        vars(trainer._logger_connector)["update_train_step_metrics"] = lambda: None
        self._call_all = call._call_callback_hooks
        call._call_callback_hooks = self._call_hooks
        self._send_line = [each.log_metrics for each in trainer.loggers]
        for number, logger in enumerate(trainer.loggers):
            vars(logger)["log_metrics"] = partial(self._log_line, number)
        epoch = trainer.fit_loop.epoch_loop
        for results in (epoch._results, epoch.val_loop._results):
            vars(results)["log"] = partial(self._collect, results, results.log)
        for each in trainer.callbacks:
            if isinstance(each, ModelCheckpoint):
                vars(each)["file_exists"] = partial(self._find_file, each.file_exists)

    def call_deferred(self, progress: Any) -> None:
        """Save, stop and log after a step, with the counts of batches that a checkpoint has."""
        self._trainer._logger_connector.on_batch_end()  # values that a new process has not noted
        for each in (progress.total, progress.current):
            each.completed -= 1
        hook, number = "on_train_batch_end", progress.current.ready - 1
        self._call_all(self._trainer, hook, None, None, number, monitoring_callbacks=True)
        progress.increment_completed()
        self._log_step()

    def deliver_lines(self) -> None:
        """Send the lines that have waited to the loggers."""
        lines, self.lines = self.lines, []
        for number, given, named in lines:
            self.call_once(partial(self._send_line[number], *given, **named))
        for logger in self._trainer.loggers if lines else ():
            logger.save()

    def restore(self) -> None:
        """Have the Trainer call callbacks and loggers itself."""
        call._call_callback_hooks = self._call_all
        epoch = self._trainer.fit_loop.epoch_loop
        for owner, name in (
            (self._trainer._logger_connector, "update_train_step_metrics"),
            *((each, "log_metrics") for each in self._trainer.loggers),
            *((each, "log") for each in (epoch._results, epoch.val_loop._results)),
            *((each, "file_exists") for each in self._trainer.callbacks),
        ):
            vars(owner).pop(name, None)

    def _call_hooks(
        self, trainer: Any, hook: str, *given: Any, monitoring_callbacks: Any = None, **named: Any
    ) -> None:
        connector, is_batch_end = trainer._logger_connector, hook == "on_train_batch_end"
        if is_batch_end:
            self.output = given[0]
        if not monitoring_callbacks:
            if connector._first_loop_iter is None and trainer._results is not None:
                connector.metrics  # noqa: B018 - computed by all ranks, before a callback reads it
            self._calls = []  # a call that has raised may have logged
            self.call_once(
                lambda: self._call_all(trainer, hook, *given, monitoring_callbacks=False, **named),
                read=lambda: (trainer.should_stop, self._take_calls()),
                restore=self._restore_effect,
            )
        if is_batch_end:
            self.is_deferred = not trainer.fit_loop._should_accumulate() and self._needs_all()
        if monitoring_callbacks is not False and not (is_batch_end and self.is_deferred):
            self._call_all(trainer, hook, *given, monitoring_callbacks=True, **named)

    def _take_calls(self) -> list[Callable[[], object]]:
        calls, self._calls = self._calls, []
        return calls

    def _restore_effect(self, effect: tuple[bool, list[Callable[[], object]]]) -> None:
        self._trainer.should_stop, calls = effect
        for log in calls:
            log()

    def _collect(
        self, results: Any, log: Callable[..., object], fx: str, *given: Any, **named: Any
    ) -> None:
        def collect() -> None:
            connector = self._trainer._logger_connector
            if connector.should_reset_tensors(fx):
                results.reset(metrics=False, fx=fx)
            log(fx, *given, **named)
            connector._current_fx = fx

        self._make(collect)

    def _log_line(self, number: int, *given: Any, **named: Any) -> None:
        self._make(lambda: self.lines.append((number, given, named)))

    def _make(self, made: Callable[[], object]) -> None:
        if self.is_calling:
            self._calls.append(made)
        made()

    def _find_file(self, find: Callable[..., bool], path: str, trainer: Any) -> bool:
        """Return whether a file is there, but for one that a broken try has made: all ranks ask."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        was_absent = self._effects[number : number + 1] == [False]
        is_there = find(path, trainer)
        is_there &= not trainer.strategy.reduce_boolean_decision(was_absent, all=False)
        self._effects[number : number + 1] = [is_there]
        return is_there

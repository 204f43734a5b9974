"""The step events of a run, and what of a step goes with its state."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from launcher.job import TrainingJob
from launcher.job.idle import idle_text
from recipes_training.data.position import read_position
from recipes_training.environment import start_number
from recipes_training.plan import is_logged
from recipes_training.trainer import StepResult
from resilience.events import EventLog


def tell_idle(job: TrainingJob, num_nodes: int, events: EventLog) -> None:
    """Say where ranks wait for each other for long at a size of the run."""
    if text := idle_text(job, num_nodes):
        events.write("warning", text=text)
        sys.stderr.write(f"recipes_training: {text}\n")
        sys.stderr.flush()


class StepWords:
    """Says what a step came to, as it goes with the state, and a `StepLog` goes on from it."""

    def __init__(self, job: TrainingJob) -> None:
        self._batch = job.trainer.global_batch_size
        self._start = start_number(os.environ)

    def describe(
        self, step: int, result: StepResult, lr: float, rest: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the words; `rest` is the small data of the state before the step."""
        return {
            "step": step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "start": self._start,
            "num_samples": read_position(rest, batch=self._batch).sample_of(step + 1),
        }


class StepLog:
    """Writes step events; a worker without a log writes none."""

    def __init__(self, job: TrainingJob, events: EventLog | None, rest: Mapping[str, Any]) -> None:
        """Go on from a state, of which `rest` is the small data.

        Its last step is written again, as its writer may be gone.
        """
        self._trainer = job.trainer
        self._events = events
        self._last_step = -1
        self._last_time_s = time.perf_counter()
        self._data_wait_s = self._blocked_s = 0.0
        if (last := rest.get("last")) is not None:
            self._go_on(last)

    def wait(self, *, data_s: float = 0.0, blocked_s: float = 0.0) -> None:
        """Note what this step has waited for its data, and stood still for checkpoints."""
        self._data_wait_s += data_s
        self._blocked_s += blocked_s

    def report(self, last: Mapping[str, Any], *, is_last: bool) -> None:
        """Write a step, of which these are the words, if it is one of those to be logged.

        The one that a run stops after is: what is kept has come so far.
        """
        step = last["step"]
        if self._events is None or not (is_last or self._is_logged(step)):
            return
        now_s = time.perf_counter()
        duration_s = (now_s - self._last_time_s) / (step - self._last_step)
        self._write(
            self._events,
            last,
            duration_s,
            waits={"data_wait_s": self._data_wait_s, "blocked_s": self._blocked_s},
        )
        self._last_step, self._last_time_s = step, now_s
        self._data_wait_s = self._blocked_s = 0.0

    def _go_on(self, last: Mapping[str, Any]) -> None:
        """Write the last committed step, of which these are the words."""
        self._last_step = last["step"]
        if self._events is not None and self._is_logged(self._last_step):
            self._write(self._events, last, None)

    def _is_logged(self, step: int) -> bool:
        return is_logged(
            step,
            log_every_n_steps=self._trainer.log_every_n_steps,
            max_steps=self._trainer.max_steps,
        )

    def _write(
        self,
        events: EventLog,
        last: Mapping[str, Any],
        duration_s: float | None,
        waits: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        events.write(
            "step",
            step=last["step"],
            loss=last["loss"],
            lr=last["lr"],
            grad_norm=last["grad_norm"],
            duration_s=duration_s,
            start=last["start"],
            num_samples=last["num_samples"],
            **waits,
        )

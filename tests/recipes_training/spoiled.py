"""Steps that are not finite, put into the torch trainer by programs of tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recipes_training.torch.initial import local_part
from recipes_training.torch.step import TorchStepper

STEP, RANK = 3, 2
"""The step that is not finite, and the rank that makes it so."""


def spoil_batch() -> None:
    """Let the loss of one rank in one step be no number, however often it is computed."""
    _spoil(lambda stepper, loss: loss * float("nan"), is_due=lambda: True)


def spoil_loss_once() -> None:
    """Let it be one the first time in the run."""
    _spoil(lambda stepper, loss: loss * float("nan"), is_due=_is_first)


def spoil_gradient_once() -> None:
    """Let the rank's gradients be none the first time, and leave its loss alone."""

    def spoil(stepper: TorchStepper, loss: Any) -> Any:
        loss = loss.clone()
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    _spoil(spoil, is_due=_is_first)


def spoil_state() -> None:
    """Let weights of the rank be no numbers, once, where its state should not change."""
    compute = TorchStepper.compute

    def spoil_and_compute(stepper: TorchStepper, rows: Any, *, step: int) -> Any:
        if step == STEP and dist.get_rank() == RANK and _is_first():
            with torch.no_grad():
                local_part(stepper._optimizer.param_groups[0]["params"][0]).fill_(float("nan"))
        return compute(stepper, rows, step=step)

    TorchStepper.compute = spoil_and_compute  # type: ignore[method-assign]


def spoil_all_from_then_on() -> None:
    """Let no step be finite from one on, on any rank."""
    _spoil(lambda stepper, loss: loss * float("inf"), is_due=lambda: True, is_for_ever=True)


def leave_out() -> None:
    """Make no update in that step, on purpose."""
    compute, update = TorchStepper.compute, TorchStepper.update

    def compute_and_note(stepper: Any, rows: Any, *, step: int) -> Any:
        stepper.step = step
        return compute(stepper, rows, step=step)

    def update_or_not(stepper: Any, lr: float) -> None:
        if stepper.step != STEP:
            update(stepper, lr)

    TorchStepper.compute = compute_and_note  # type: ignore[method-assign]
    TorchStepper.update = update_or_not  # type: ignore[method-assign]


def _spoil(
    spoil: Callable[[TorchStepper, Any], Any],
    *,
    is_due: Callable[[], bool],
    is_for_ever: bool = False,
) -> None:
    compute, loss_of = TorchStepper.compute, TorchStepper._loss

    def compute_and_note(stepper: Any, rows: Any, *, step: int) -> Any:
        is_here = step == STEP and dist.get_rank() == min(RANK, dist.get_world_size() - 1)
        stepper.is_spoiled = (is_here or (is_for_ever and step >= STEP)) and is_due()
        return compute(stepper, rows, step=step)

    def spoiled_loss(stepper: Any, rows: Any) -> Any:
        loss = loss_of(stepper, rows)
        return spoil(stepper, loss) if stepper.is_spoiled else loss

    TorchStepper.compute = compute_and_note  # type: ignore[method-assign]
    TorchStepper._loss = spoiled_loss  # type: ignore[method-assign]


def _is_first() -> bool:
    try:
        (Path(os.environ["TEST_MARKERS"]) / "spoiled").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

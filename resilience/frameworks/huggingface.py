"""transformers.Trainer, and trl's, whose training goes on through faults.

    from resilience.frameworks.huggingface import Trainer

in place of `from transformers import Trainer` is all that a program changes; `SFTTrainer` and
`DPOTrainer` stand for trl's. Trainer's own methods compute, log, evaluate and save as ever. The
loop that calls them is that of `resilience.protect`.
"""

# ruff: noqa: SLF001 - Trainer has no public way into its loop

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length, rotate_checkpoints

from resilience.errors import StateError
from resilience.frameworks.callback_calls import CallbackCalls
from resilience.frameworks.trainer_state import TrainerProgress
from resilience.frameworks.training_data import check_data
from resilience.inprocess.handles import read_handles
from resilience.protection.run import Run

VERSIONS = ("5.24.",)
"""Versions of transformers whose Trainer has the methods that are called here."""
_SAVING = "saving"
"""Folder of the checkpoint that is being written, in a Trainer's own."""
_REPLACED = ("get_batch_samples", "_run_epoch")
"""Methods of a Trainer that are not called here."""
_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")
"""Schedulers that step with an evaluation."""


class _TrainerRun(Run):
    """The steps of a Trainer."""

    _keeps_rest = _shares_seeds = True  # samplers of an evaluation split one permutation

    def __init__(self, loop: _Loop, model: nn.Module, also: Sequence[object]) -> None:
        self._loop_of_trainer = loop
        super().__init__(model, loop.trainer.optimizer.optimizer, also, seed=loop.seed, ignore=())

    def _find_due(self, step: int) -> list[Callable[[int], object]]:
        return [self._loop_of_trainer.end_step] if step and self._loop_of_trainer.is_due() else []

    def _share(self) -> None:
        super()._share()
        self._loop_of_trainer.progress.share()

    def _check_collective(self, name: str) -> None:
        if self._loop_of_trainer.calls.is_calling:
            self._refuse(
                f"{name} in a callback, which a process that joins may call alone; communicate in "
                "compute_loss, or in an evaluation"
            )
        super()._check_collective(name)


class RecoveryMixin:
    """A Trainer whose train() goes on through faults under an agent that recovers.

    For a subclass of transformers.Trainer: `class MyTrainer(RecoveryMixin, Trainer)`. Without such
    an agent its first fault ends it, and the bits are the same. Raises StateError for what is not
    kept exact, with the remedy.
    """

    _is_saving = _has_trained = False

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
        """Train; a process that joins a run which began anew loads no checkpoint either."""
        trainer: Any = self
        rank, num_ranks = trainer.args.process_index, trainer.args.world_size
        if num_ranks > 1:
            # In a set-up: a process that joins is given what the first one has sent.
            resumes = torch.zeros(num_ranks, dtype=torch.int64, device=trainer.args.device)
            resumes[rank] = bool(resume_from_checkpoint)
            dist.all_reduce(resumes)
            resume_from_checkpoint = resume_from_checkpoint if resumes[rank] else None
        return super().train(resume_from_checkpoint, *given, **named)  # type: ignore[misc]

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        refuse(self, trial)
        return _Loop(self, resume_from_checkpoint, ignore_keys_for_eval).train()

    def _get_output_dir(self, trial: Any) -> str:
        found: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return str(Path(found, _SAVING)) if self._is_saving else found

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save into a folder of its own, and move the whole checkpoint to the others.

        A kill during a save would leave a torn checkpoint, and a resume would load it.
        """
        trainer: Any = self
        if trainer.is_local_process_zero():
            shutil.rmtree(Path(self._get_output_dir(trial), _SAVING), ignore_errors=True)
        _wait_for_all(self)
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            move_checkpoint(self, Path(self._get_output_dir(trial)))
        finally:
            self._is_saving = False


class _Loop:
    """One call of a Trainer's train()."""

    def __init__(self, trainer: Any, resume: str | None, ignore_keys: list[str] | None) -> None:
        self.trainer = trainer
        self._ignore_keys = ignore_keys
        self._resume = resume
        trainer.accelerator.free_memory()
        if not has_length(loader := trainer.get_train_dataloader()):
            raise StateError(
                "the training data has no length, so that an epoch's end is not known; give a "
                "dataset with one, or a map-style dataset"
            )
        (
            num_epochs,
            updates_per_epoch,
            _,
            self._num_samples,
            _,
            self._steps_in_epoch,
            self._until,
        ) = trainer.set_initial_training_values(trainer.args, loader)
        # Before a checkpoint is loaded: a process that joins may find a newer one.
        self.progress = TrainerProgress(trainer)
        self._place = trainer._init_training_state(
            self._until, updates_per_epoch, num_epochs, resume, None
        )
        self._model, self._loader = trainer._prepare_for_training(self._until, loader, resume)
        self._accumulate: int = trainer.args.gradient_accumulation_steps
        self.seed: int = trainer.args.seed
        self._begin_counts()
        args = trainer.args
        place = {"rank": args.process_index, "world_size": args.world_size}
        check_data(loader, **place, device=args.device)
        has_agent = read_handles(os.environ) is not None
        self.calls = CallbackCalls(trainer.callback_handler, writes_log=has_agent)
        self._run = self._protect()

    def _begin_counts(self) -> None:
        trainer = self.trainer
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer._initial_global_step = trainer._globalstep_last_logged = trainer.state.global_step
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar = 0.0

    def _protect(self) -> Run:
        trainer, model = self.trainer, self._model
        if isinstance(model, DistributedDataParallel):
            # Trainer's default. A parameter without a gradient is named at its first backward pass.
            model.find_unused_parameters = False
        elif dist.is_initialized() and trainer.args.world_size < dist.get_world_size():
            raise StateError(
                "TrainingArguments take this for a training in one process, though it has a group "
                "with others; to train on the CPU, set use_cpu=True"
            )
        elif trainer.args.world_size > 1 and not isinstance(model, FSDPModule):
            raise StateError(
                "the Trainer has not wrapped its model in DistributedDataParallel; call evaluate() "
                "and predict() after train(), or with another Trainer"
            )
        scaler = trainer.accelerator.scaler
        also = [trainer.lr_scheduler, self.progress, *([scaler] if scaler is not None else [])]
        run = _TrainerRun(self, model, also)
        if self._resume is not None:
            step, (epoch, position) = trainer.state.global_step, self._place
            cursor = {"step": step, "epoch": epoch, "position": position}
            run.load_state_dict({"step": step, "cursor": cursor})
        return run

    def train(self) -> Any:
        """Take all steps; return the results of the training."""
        trainer, run = self.trainer, self._run
        self._model.zero_grad()
        trainer.control = trainer.callback_handler.on_train_begin(
            trainer.args, trainer.state, trainer.control
        )
        self.progress.begin_part()
        for found in run.steps(self._loader, until=self._until, accumulate=self._accumulate):
            samples = found if self._accumulate > 1 else [found]
            with run.step():
                self._take_step(samples)
        self.calls.restore_handler()
        return trainer._finalize_training(None, self._num_samples, self.progress.start_s)

    # ---- a step

    def _take_step(self, samples: Sequence[Any]) -> None:
        trainer = self.trainer
        self.progress.begin_part()
        self.calls.begin_part("step", self._run.index)
        if not self._cursor["position"] or self._run.index == trainer._initial_global_step:
            self._call_event("on_epoch_begin")
        num_items = trainer._get_num_items_in_batch(samples, trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(samples)
        self._call_event("on_step_begin")
        for number, inputs in enumerate(samples, start=1):
            self._take_micro_batch(inputs, num_items, is_last=number == len(samples))
        self.progress.begin_share()
        norm = None
        if trainer.args.max_grad_norm > 0:
            norm = trainer._clip_grad_norm(self._model)
        norm = trainer._get_grad_norm(self._model, grad_norm=norm)
        self._call_event("on_pre_optimizer_step")
        trainer.optimizer.step()
        self._call_event("on_optimizer_step")
        self.progress.note_step(grad_norm=norm, learning_rate=trainer._get_learning_rate())
        is_skipped = trainer.accelerator.optimizer_step_was_skipped
        if not is_skipped and type(trainer.lr_scheduler).__name__ not in _BY_METRIC:
            trainer.lr_scheduler.step()
        self._model.zero_grad()
        trainer.state.global_step += 1
        end = self._cursor["position"] + len(samples)
        trainer.state.epoch = self._cursor["epoch"] + end / self._steps_in_epoch
        self._call_event("on_step_end")

    def _take_micro_batch(self, inputs: Any, num_items: Any, *, is_last: bool) -> None:
        trainer = self.trainer
        trainer.accelerator.gradient_state._set_sync_gradients(is_last)
        with nullcontext() if is_last else trainer.accelerator.no_sync(model=self._model):
            loss = trainer.training_step(self._model, inputs, num_items)
        if trainer.args.logging_nan_inf_filter and not bool(torch.isfinite(loss)):
            num_steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / num_steps
        else:
            trainer._tr_loss += loss
        trainer.current_flos += float(trainer.floating_point_ops(inputs))
        trainer._track_num_input_tokens(inputs)
        if not is_last:
            self._call_event("on_substep_end")

    # ---- between steps

    def is_due(self) -> bool:
        """Return whether something is to be logged, evaluated, saved or ended after the step."""
        return self.trainer.control.should_log or self._has_flags or self._ends_epoch

    def end_step(self, step: int) -> None:
        """Log, evaluate and save what is due after a step."""
        trainer = self.trainer
        self.progress.begin_part()
        self.calls.begin_part("end of a step", step, holds_lines=True)
        # A loader that is used again draws less than a new process's.
        vars(trainer).pop("_eval_dataloaders", None)
        self._log_save_evaluate()
        if self._ends_epoch:
            self._call_event("on_epoch_end")
            self._log_save_evaluate()
        self.calls.deliver_lines()
        if self._has_flags:  # set in on_log
            self._log_save_evaluate()
        if trainer.control.should_training_stop and step < self._until:
            self._run.stop()
        elif trainer.control.should_epoch_stop:
            raise StateError(
                "a callback has set control.should_epoch_stop, which is not kept exact; end the "
                "training with control.should_training_stop, or train shorter epochs"
            )

    @property
    def _cursor(self) -> dict[str, Any]:
        return self._run.state.cursor

    @property
    def _has_flags(self) -> bool:
        control = self.trainer.control
        return bool(control.should_evaluate or control.should_save)

    @property
    def _ends_epoch(self) -> bool:
        control, end = self.trainer.control, self._cursor.get("position", 0) + self._accumulate
        is_ended: bool = control.should_training_stop or control.should_epoch_stop
        return is_ended or end >= self._steps_in_epoch

    def _log_save_evaluate(self) -> None:
        trainer = self.trainer
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.progress.log["grad_norm"],
            self._model,
            None,
            self._cursor["epoch"],
            self._ignore_keys,
            self.progress.start_s,
            learning_rate=self.progress.log["learning_rate"],
        )

    def _call_event(self, event: str) -> None:
        """Call an event of the callbacks."""
        trainer = self.trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control)


def move_checkpoint(trainer: Any, folder: Path) -> None:
    """Move the checkpoint of this step out of the folder in which all ranks have written it."""
    name = f"checkpoint-{trainer.state.global_step}"
    made, target = folder / name, folder.parent / name
    is_first = trainer.is_world_process_zero()
    best = folder.parent / f"checkpoint-{trainer.state.best_global_step}"
    if best == target or best.is_dir():
        trainer.state.best_model_checkpoint = str(best)
        if trainer.args.should_save:
            trainer.state.save_to_json(str(made / TRAINER_STATE_NAME))
    _wait_for_all(trainer)
    if is_first:
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    _wait_for_all(trainer)
    if trainer.is_local_process_zero():
        # Where the disk is shared it has moved, which a rename knows better than a cached look.
        with suppress(FileNotFoundError):
            made.rename(folder / "own")
            shutil.rmtree(target, ignore_errors=True)
            (folder / "own").rename(target)
        shutil.rmtree(folder, ignore_errors=True)
    _wait_for_all(trainer)
    if trainer.args.should_save:
        rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )


def _is_own(trainer: Any, name: str) -> bool:
    return getattr(type(trainer), name) is not getattr(transformers.Trainer, name)


def _wait_for_all(trainer: Any) -> None:
    if trainer.args.world_size > 1:
        dist.barrier()


def refuse(trainer: Any, trial: Any) -> None:
    """Raise StateError for what is not kept exact through faults."""
    if not transformers.__version__.startswith(VERSIONS):
        raise StateError(
            f"transformers {transformers.__version__} has another loop; allowed: "
            f"{', '.join(each + 'x' for each in VERSIONS)}"
        )
    args = trainer.args
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP of version 1": trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2,
        "a search of hyperparameters": trial is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "torch_compile": args.torch_compile,
        "eval_on_start": args.eval_on_start,
        "DataParallel over several GPUs": args.n_gpu > 1,
        "inputs that are kept over steps (GRPO)": hasattr(trainer, "_buffered_inputs"),
        "sync_ref_model": getattr(args, "sync_ref_model", False),
        "push_to_hub": args.push_to_hub,
        "sync_each_batch": trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"),
        "train() a second time": trainer._has_trained,
        **{f"its own {name}": _is_own(trainer, name) for name in _REPLACED},
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise StateError(
            f"training with {' and '.join(found)} is not kept exact through faults; leave it out"
        )
    trainer._has_trained = True


def __getattr__(name: str) -> Any:
    """Make the class when it is asked for: trl takes seconds to import."""
    if name not in ("Trainer", "SFTTrainer", "DPOTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = "transformers" if name == "Trainer" else "trl"
    base: Any = getattr(importlib.import_module(package), name)
    made = globals()[name] = type(name, (RecoveryMixin, base), {"__module__": __name__})
    return made

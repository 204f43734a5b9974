"""Settings of a Lightning Trainer that are refused before its first step."""

# ruff: noqa: SLF001 - Lightning has no public way to ask for some of them

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler

from resilience.errors import StateError
from resilience.frameworks.lightning_files import WholeCheckpointIO

VERSIONS = ("2.6.",)
"""Versions of Lightning whose loops have the methods that are called here."""
_CALLBACKS = (
    *("Callback", "Checkpoint", "ModelCheckpoint", "EarlyStopping", "LearningRateMonitor"),
    *("ModelSummary", "RichModelSummary", "ProgressBar", "TQDMProgressBar", "RichProgressBar"),
)
"""Callbacks of Lightning's that are kept exact."""


def refuse(trainer: Any) -> None:
    """Raise StateError for what is not kept exact through faults."""
    loop, plugin, data = (
        trainer.fit_loop,
        trainer.precision_plugin,
        trainer.fit_loop._combined_loader,
    )
    refused = {
        f"Lightning {lightning.__version__}, not {VERSIONS[0]}x,": (
            not lightning.__version__.startswith(VERSIONS)
        ),
        type(plugin).__name__: type(plugin) not in (Precision, MixedPrecision),
        "another CheckpointIO": type(trainer.strategy.checkpoint_io) is not WholeCheckpointIO,
        "LBFGS": torch.optim.LBFGS in map(type, trainer.optimizers),
        "a profiler": type(trainer.profiler) is not PassThroughProfiler,
        "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
        "a val_check_interval of time": trainer._val_check_time_interval is not None,
        "several loaders": data.iterables is not data.flattened[0],
        "training data without a length": loop.max_batches == float("inf"),
        "a dataloader_iter": isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher),
        **{type(each).__name__: True for each in trainer.callbacks if _is_refused(each)},
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise StateError(
            f"training with {' and '.join(found)} is not kept exact through faults; leave it out"
        )


def _is_refused(callback: Any) -> bool:
    """Return whether a callback is, or derives from, one of Lightning's not kept exact."""
    return (
        any(
            base.__module__.startswith("lightning.pytorch.callbacks")
            and base.__name__ not in _CALLBACKS
            for base in type(callback).__mro__
        )
        or getattr(callback, "_train_time_interval", None) is not None
        or getattr(callback, "save_last", None) == "link"
    )

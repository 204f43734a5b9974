"""State of a Lightning Trainer that its loops change, beside model, optimizers and schedulers."""

# ruff: noqa: SLF001 - Lightning has no public way into its loops

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector import result as logged
from torch import nn
from torchmetrics import Metric

from resilience.frameworks import plain_values as plain
from resilience.frameworks.lightning_calls import HookCalls
from resilience.frameworks.shared_texts import begin_texts

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that each module has; protect looks after those."""


class FitProgress:
    """Counts, callbacks and logged values of a Trainer.

    For a step that is run again, and for a process that joins. What self.log has collected, and
    scores of Checkpoint and EarlyStopping, are each rank's own. `share` brings them to all ranks,
    so that a process that takes a lost rank's place gets that rank's. Of the attributes of module
    and callbacks it gets those that have changed since the training began.
    """

    gives_copies = True

    def __init__(self, trainer: Any, calls: HookCalls) -> None:
        self._trainer, self._calls, self._rank = trainer, calls, trainer.global_rank
        self._rows: list[str] = []
        self.is_deferred = False
        module, epoch = trainer.lightning_module, trainer.fit_loop.epoch_loop
        self._counts = list(_find_counts(trainer.fit_loop))
        self._results = [epoch._results, epoch.val_loop._results]
        kinds = (Checkpoint, EarlyStopping)
        self._for_itself = [each for each in trainer.callbacks if isinstance(each, kinds)]
        self._for_itself.append(trainer._logger_connector)
        self._for_itself += [each for each in module.modules() if isinstance(each, Metric)]
        others = (each for each in trainer.callbacks if not isinstance(each, kinds))
        self._module = plain.KeptValues(module, without=_OF_MODULES)
        callbacks = plain.name_by_class(others)
        self._callbacks = {key: plain.KeptValues(each) for key, each in callbacks.items()}
        self._before: dict[str, Any] | None = None
        """Changed values of callbacks at the begin of what is run again."""

    def begin_part(self) -> None:
        """Note that a step, or what follows one, begins."""
        self._before = None

    def note_step(self, *, is_deferred: bool) -> None:
        """Note whether a step has left something for all ranks to do."""
        self.is_deferred = is_deferred

    @contextmanager
    def share(self) -> Iterator[None]:
        """Bring what each rank has for itself to all ranks, beside what the block does."""
        place = {"rank": self._rank, "num_ranks": self._trainer.world_size}
        end = begin_texts(self._write_own(), self._rows, **place)
        yield
        self._rows = end()

    def compared_state(self) -> dict[str, Any]:
        """Return what is the same on all ranks."""
        return {"loops": self._trainer.fit_loop.state_dict(), "stop": self._trainer.should_stop}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it: numbers, text and tensors."""
        callbacks = {key: each.read_changed() for key, each in self._callbacks.items()}
        return {
            "rank": self._rank,
            "should_stop": self._trainer.should_stop,
            "is_deferred": self.is_deferred,
            "counts": [plain.read_values(each) for each in self._counts],
            "module": self._module.read(),
            "callbacks": callbacks if self._before is None else self._before,
            "own": self._write_own(),
            "rows": list(self._rows),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over this rank's own state of before, or another rank's."""
        is_own, callbacks = state_dict["rank"] == self._rank, state_dict["callbacks"]
        self._trainer.should_stop = state_dict["should_stop"]
        self.is_deferred = state_dict["is_deferred"]
        for each, values in zip(self._counts, state_dict["counts"], strict=True):
            plain.write_values(each, values)
        if is_own:
            # Callbacks keep what they have: each call is made once.
            self._module.restore(state_dict["module"])
        else:
            self._module.take_over(state_dict["module"])
            for key in self._callbacks.keys() & callbacks.keys():
                self._callbacks[key].take_over(callbacks[key])
        self._before = callbacks
        self._rows = list(state_dict["rows"])
        self._read_own(state_dict["own"] if is_own or not self._rows else self._rows[self._rank])

    def _write_own(self) -> str:
        own = {
            "lines": self._calls.lines,
            "values": [plain.read_values(each, without=_OF_MODULES) for each in self._for_itself],
            "results": [_read_results(each) for each in self._results],
        }
        return json.dumps(plain.as_json(own))

    def _read_own(self, text: str) -> None:
        own = json.loads(text, object_hook=plain.from_json)
        self._calls.lines[:] = own["lines"]
        for each, values in zip(self._for_itself, own["values"], strict=True):
            plain.write_values(each, values)
        for results, found in zip(self._results, own["results"], strict=True):
            _write_results(results, found, self._trainer)


def _find_counts(owner: Any) -> Iterator[Any]:
    yield owner
    for each in vars(owner).values():
        if isinstance(each, (_Loop, _BaseProgress)):
            yield from _find_counts(each)


def _read_results(results: Any) -> dict[str, Any]:
    """Return what self.log has collected, but for the values of torchmetrics' metrics."""
    return {
        key: {
            "is_tensor": each.is_tensor,
            "meta": plain.read_values(each.meta),
            "reduce": each.meta.reduce_fx.__name__,
            "sync": plain.read_values(each.meta.sync),
            "values": plain.read_values(each, without=_OF_MODULES),
        }
        for key, each in results.items()
    }


def _write_results(results: Any, found: Mapping[str, Any], trainer: Any) -> None:
    results.clear()
    for key, each in found.items():
        meta = logged._Metadata(**each["meta"], reduce_fx=getattr(torch, each["reduce"]))
        meta.sync = logged._Sync(fn=trainer.strategy.reduce, **each["sync"])
        made = results[key] = logged._ResultMetric(meta, is_tensor=each["is_tensor"])
        plain.write_values(made, each["values"])
        if not made.is_tensor:
            made.value = trainer.lightning_module.get_submodule(meta.metric_attribute)

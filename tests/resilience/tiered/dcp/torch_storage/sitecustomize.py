"""Imported by each Python process of torch's own tests: what they save goes into a daemon.

A path of theirs becomes a namespace, in which each save is the same step. With no daemon named they
save into files, as they do by themselves. Tests that ask for GPUs run over gloo, where they can.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SOCKET = os.environ.get("TIERED_TESTS_SOCKET", "")


def _save_into_daemon(checkpoint: ModuleType) -> None:
    from torch.distributed.checkpoint import _storage_utils, filesystem

    from tests.resilience.tiered.dcp.torch_storage.path_storage import PathReader, PathWriter

    for module in (checkpoint, filesystem, _storage_utils):
        module.FileSystemReader = PathReader  # type: ignore[attr-defined]
        module.FileSystemWriter = PathWriter  # type: ignore[attr-defined]


def _run_without_gpus(common: ModuleType) -> None:
    import torch

    # What they put onto a GPU without a question stays where it is.
    torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore
    for name in ("arange", "ones", "rand"):
        setattr(torch, name, _stay_here(getattr(torch, name)))
    common.skip_if_lt_x_gpu = lambda count, **_: lambda test: test  # type: ignore[attr-defined]


def _stay_here(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*arguments: Any, device: Any = None, **options: Any) -> Any:
        return make(*arguments, device=None if device == "cuda" else device, **options)

    return made


def _meet_over_gloo(common: ModuleType) -> None:
    first = common.DTensorTestBase.init_pg

    def init_pg(self: object, eager_init: bool = False, backend: str | None = None) -> None:
        first(self, eager_init, "gloo")

    common.DTensorTestBase.init_pg = init_pg


def _shard_on_cpus(fsdp: ModuleType) -> None:
    import torch

    first = fsdp.FullyShardedDataParallel.__init__

    def init(self: object, *arguments: object, **options: object) -> None:
        # It takes CPUs only where it is told to.
        first(self, *arguments, **{"device_id": torch.device("cpu"), **options})

    fsdp.FullyShardedDataParallel.__init__ = init


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.fsdp": _shard_on_cpus,
    "torch.testing._internal.common_distributed": _run_without_gpus,
    "torch.testing._internal.distributed._tensor.common_dtensor": _meet_over_gloo,
}
if SOCKET:
    CHANGES["torch.distributed.checkpoint"] = _save_into_daemon


class _Changer(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changer())

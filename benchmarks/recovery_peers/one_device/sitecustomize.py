"""Has the groups of a job whose ranks share one GPU go through gloo: NCCL refuses such ranks.

In the PYTHONPATH of `benchmarks.gpu_recipes`. The interpreter imports it before anything else, so
it waits for torch's own modules.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _take_gloo(module: Any) -> None:
    init = module.init_process_group

    def init_with_gloo(*_: object, device_id: object = None, **others: Any) -> None:
        init("gloo", **others)

    module.init_process_group = init_with_gloo


def _gather_plainly(module: Any) -> None:
    """Replace a call that ends torch 2.11 by SIGSEGV: it waits for gloo with a GPU's tensors."""
    import torch.distributed as dist

    def gather(tensor: Any) -> Any:
        shards = [dim for dim, each in enumerate(tensor.placements) if each.is_shard()]
        local = tensor.to_local()
        for dim in shards:
            num = tensor.device_mesh.size(dim)
            part = local.new_zeros((-(-tensor.shape[0] // num), *tensor.shape[1:]))
            part[: len(local)] = local
            local = part.new_empty((num * len(part), *part.shape[1:]))
            dist.all_gather_into_tensor(local, part, group=tensor.device_mesh.get_group(dim))
        return local[: tensor.shape[0]]

    module.DTensor.full_tensor = gather


_CHANGES: dict[str, Callable[[Any], None]] = {
    "torch.distributed.distributed_c10d": _take_gloo,
    "torch.distributed.tensor._api": _gather_plainly,
}


class _Finder:
    """Finds torch's modules as anybody else, and changes each once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            change(module)

        loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]

"""Has the groups of a job whose ranks share one GPU go through gloo: NCCL refuses such ranks.

In the PYTHONPATH of `benchmarks.gpu_recipes`. The interpreter imports it before anything else, so
it waits for torch's own module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch.distributed.distributed_c10d"


class _Finder:
    """Finds torch's module as anybody else, and changes it once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            init = module.init_process_group

            def init_with_gloo(*_: object, device_id: object = None, **others: Any) -> None:
                init("gloo", **others)

            module.init_process_group = init_with_gloo

        loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]

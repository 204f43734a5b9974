"""What the process that forks workers imports, it could fork with on a machine with GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, json, sys
import torch

asked = []
for name in ("is_available", "device_count", "current_device", "get_device_properties", "init"):
    def ask(*given, name=name, call=getattr(torch.cuda, name), **named):
        asked.append(name)
        return call(*given, **named)
    setattr(torch.cuda, name, ask)
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps([asked, torch.cuda.is_initialized()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["recipes_training.preload"], id="torch"),
        pytest.param(
            ["recipes_training.megatron.trainer", "recipes_training.recovery"], id="megatron"
        ),
    ],
)
def test_imports_ask_nothing_of_cuda(modules: list[str]) -> None:
    """The first question, also whether there is a GPU, would leave forked workers without one."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *modules],
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(ended.stdout.splitlines()[-1]) == [[], False]

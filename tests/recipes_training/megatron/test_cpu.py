"""What stands in for torch.cuda has a meaning on a CPU; each case fails without its stand-in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes_training.megatron.cpu import stand_in
from tests.recipes_training.workers import ROOT

CASES = {
    "current_device": "assert str(torch.cuda.current_device()) == 'cpu'",
    "_lazy_call": "found = []; torch.cuda._lazy_call(lambda: found.append(1)); assert found == [1]",
    "default_generators": "assert torch.cuda.default_generators[3] is torch.default_generator",
    "Stream": (
        "torch.cuda.Stream('cuda', priority=-1).wait_stream(torch.cuda.current_stream())\n"
        "assert torch.cuda.Stream | None"
    ),
    "current_stream": "torch.cuda.current_stream().record_event().synchronize()",
    "default_stream": "torch.cuda.default_stream().synchronize()",
    "stream": "with torch.cuda.stream(torch.cuda.Stream()): pass",
    "synchronize": "torch.cuda.synchronize()",
    "compile": "def f(): pass\nassert torch.compile(f) is f and torch.compile()(f) is f",
    "type": "assert torch.zeros(1).type() == 'torch.cuda.FloatTensor'",
    "get_rng_state": (
        "torch.manual_seed(3); state = torch.cuda.get_rng_state(); first = torch.rand(2)\n"
        "torch.cuda.set_rng_state(state); assert torch.equal(first, torch.rand(2))"
    ),
    "manual_seed": (
        "torch.manual_seed(4); torch.cuda.manual_seed(3); first = torch.rand(2)\n"
        "torch.manual_seed(3); assert torch.equal(first, torch.rand(2))"
    ),
    **{
        name: f"assert torch.{name}({values}, device='cuda').device.type == 'cpu'"
        for name, values in {
            "arange": "3",
            "empty": "3",
            "empty_like": "torch.zeros(3)",
            "full": "(3,), 1.0",
            "ones": "3",
            "ones_like": "torch.zeros(3)",
            "tensor": "[1.0]",
            "zeros": "3",
            "zeros_like": "torch.zeros(3)",
        }.items()
    },
}


PROGRAM = """
import sys, torch
from recipes_training.megatron.cpu import stand_in

def try_all():
    passed = []
    for number, case in enumerate(sys.argv[1:]):
        try:
            exec(case, {"torch": torch})
        except Exception:
            continue
        passed.append(number)
    return passed

assert try_all() == [], "before"
stand_in()
stand_in()
assert try_all() == list(range(len(sys.argv) - 1)), "behind"
"""


def test_every_stand_in_has_a_meaning_and_without_it_each_case_fails() -> None:
    """One process for all: each alone would import torch once more."""
    command = [sys.executable, "-c", PROGRAM, *CASES.values()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_they_come_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    message = r"megatron.core was imported before torch.cuda had its stand-ins"

    with pytest.raises(RuntimeError, match=message):
        stand_in()

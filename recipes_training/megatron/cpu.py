"""Stand-ins for torch.cuda, with which Megatron-Core trains on a CPU.

Megatron asks torch.cuda for devices, streams and random states wherever it runs. Where the job's
instance is `cpu`, `stand_in` gives each name that training touches a meaning on the CPU. Megatron
binds some of them when it is imported, so they have to be there before.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
    "zeros_like",
)
_MARK = "_is_stood_in"


class _Stream:
    """A stream on which everything has happened already.

    A class in the place of torch's, as which annotations of modules name it.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Take what one of a device is made with."""

    def wait_stream(self, _other: object) -> None:
        """Return at once."""

    def record_event(self) -> _Stream:
        """Return what can be waited for as an event is."""
        return self

    def synchronize(self) -> None:
        """Return at once."""


class _Generators:
    """For every device the CPU's generator."""

    def __getitem__(self, _number: object) -> torch.Generator:
        return torch.default_generator


def stand_in() -> None:
    """Put the stand-ins into torch, for the rest of this process; any number of times.

    Raises RuntimeError where Megatron has been imported before.
    """
    cuda: Any = torch.cuda
    if getattr(cuda, _MARK, False):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before torch.cuda had its stand-ins")
    # Asked for by Megatron wherever tensors are parallel; it orders kernels, and a CPU has none.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # With one generator for both, each use of the tracker seems to it to have drawn on the CPU.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    for holder, name, value in _stand_ins():
        setattr(holder, name, value)
    setattr(cuda, _MARK, True)


def _stand_ins() -> list[tuple[Any, str, Any]]:
    cuda: Any = torch.cuda
    stream = _Stream()
    found: list[tuple[Any, str, Any]] = [
        (cuda, "current_device", lambda: _CPU),
        (cuda, "_lazy_call", lambda call, **_: call()),
        (cuda, "default_generators", _Generators()),
        (cuda, "Stream", _Stream),
        (cuda, "current_stream", lambda *_: stream),
        (cuda, "default_stream", lambda *_: stream),
        (cuda, "stream", lambda _: nullcontext()),
        (cuda, "synchronize", lambda *_: None),
        # Decorates functions of Megatron at its import; compiled ones would round otherwise.
        (torch, "compile", _as_it_is),
        (torch.Tensor, "type", _named_as_on_a_gpu(torch.Tensor.type)),
        *((torch, name, _on_the_cpu(getattr(torch, name))) for name in _FACTORIES),
    ]
    for module in (cuda, cuda.random):
        found += [
            (module, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
            (module, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
            (module, "manual_seed", torch.default_generator.manual_seed),
        ]
    return found


def _as_it_is(function: Any = None, **_: object) -> Any:
    return function if function is not None else lambda each: each


def _on_the_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        if torch.device(options.get("device") or "cpu").type == "cuda":
            options["device"] = _CPU
        return factory(*arguments, **options)

    return make


def _named_as_on_a_gpu(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Name a tensor's type as on a GPU: by that name Megatron's optimizer sorts parameters."""

    @functools.wraps(kind)
    def name(*arguments: Any, **options: Any) -> Any:
        found = kind(*arguments, **options)
        is_name = isinstance(found, str) and not found.startswith("torch.cuda.")
        return f"torch.cuda.{found.removeprefix('torch.')}" if is_name else found

    return name

"""The state of a torch module and its optimizer, as recovery sees it.

Buffers are no part of the state: those that forward writes are refused, and the others are made by
the module's constructor.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Adam, AdamW, Optimizer

from resilience.errors import StateError
from resilience.state.view import NamedTensor

_ALLOWED = (Adam, AdamW)


class TorchState:
    """Parameters, optimizer tensors and the optimizer's options of one rank; a StateView.

    `extra` is the caller's JSON data that travels with them: positions,
    counters. Nothing is copied; the optimizer's state must exist already, see
    `materialise`.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, *, replica: int = 0, shard: str = ""
    ) -> None:
        self.extra: dict[str, Any] = {}
        self.replica = replica
        self.shard = shard
        self._module = module
        self._optimizer = optimizer
        self._begins: dict[str, tuple[int, ...]] = {}

    def tensors(self) -> list[NamedTensor]:
        """Return the local part of all parameters by name, then of the optimizer's tensors.

        A parameter that is shared between modules counts once. Raises StateError
        for an optimizer that keeps anything but tensors.
        """
        return [self._named(name, each) for name, each in self._entries()]

    def entries(self) -> dict[str, Tensor]:
        """Return the parameters and tensors by name as torch has them: some may be DTensors."""
        return dict(self._entries())

    def owners(self) -> list[Tensor] | None:
        """Return the same parameters and tensors themselves; None if one of them is no plain one.

        A DTensor is not plain: its sharding keeps more references to its memory.
        """
        owners = [each for _, each in self._entries()]
        return owners if all(type(each) in {Tensor, nn.Parameter} for each in owners) else None

    def read_rest(self) -> dict[str, Any]:
        """Return the options of each parameter group, the learning rate among them, and `extra`."""
        groups = [
            {key: value for key, value in _options(group).items() if not isinstance(value, Tensor)}
            for group in self._optimizer.param_groups
        ]
        return {"groups": groups, "extra": self.extra}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Set each group's options and the content of `extra`, which stays the same dict.

        Raises StateError, with nothing changed, where the groups are not the same in number.
        """
        groups = self._optimizer.param_groups
        if len(rest["groups"]) != len(groups):
            raise StateError(
                f"{len(rest['groups'])} parameter groups arrived for an optimizer with "
                f"{len(groups)}; build the optimizer alike on all ranks"
            )
        for group, options in zip(groups, rest["groups"], strict=True):
            for key, value in options.items():
                # JSON knows no tuples: betas.
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        self.extra.clear()
        self.extra.update(rest["extra"])

    def _named(self, name: str, tensor: Tensor) -> NamedTensor:
        with torch.no_grad():
            if not isinstance(tensor, DTensor):
                return NamedTensor(name=name, tensor=tensor.detach())
            if name not in self._begins:
                # Kept: who digests the state after each step asks for it as often.
                _, begin = compute_local_shape_and_global_offset(
                    tensor.shape, tensor.device_mesh, tensor.placements
                )
                self._begins[name] = tuple(begin)
            return NamedTensor(
                name=name,
                tensor=tensor.to_local().detach(),
                full_shape=tuple(tensor.shape),
                begin=self._begins[name],
            )

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        parameters = sorted(self._module.named_parameters())
        for name, parameter in parameters:
            yield f"parameter/{name}", parameter
        for name, parameter in parameters:
            yield from self._moments(name, parameter)
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in _options(group).items():
                if isinstance(value, Tensor):
                    yield f"option/{number}/{key}", value

    def _moments(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        state = self._optimizer.state.get(parameter, {})
        for key in sorted(state):
            if not isinstance(state[key], Tensor):
                raise StateError(
                    f"{type(self._optimizer).__name__} keeps {key!r} of parameter {name!r} as "
                    f"{type(state[key]).__name__}, not as a tensor; use {_allowed_names()}"
                )
            yield f"optimizer/{name}/{key}", state[key]


def materialise(optimizer: Optimizer, *, has_frozen: bool = False) -> None:
    """Create what the optimizer would create in its first step, bit for bit; keeps what is there.

    A replaced process has then memory to receive into. A parameter that never
    has a gradient gets zeros that torch would not create and nobody reads; one that
    requires none is passed over, unless the optimizer `has_frozen` ones that are given
    their gradients from elsewhere. Moments take memory when they are written (`make_zeros`).
    Raises StateError for anything but Adam and AdamW themselves.
    """
    if type(optimizer) not in _ALLOWED:
        raise StateError(
            f"what {type(optimizer).__name__} keeps cannot be created before its first step; "
            f"use {_allowed_names()}"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_trained = parameter.requires_grad or has_frozen
            if is_trained and not optimizer.state[parameter]:
                optimizer.state[parameter].update(_first_moments(parameter, group))


def make_zeros(tensor: Tensor) -> Tensor:
    """Return zeros like a tensor that take memory when they are written, as far as torch allows.

    Those of a replaced rank never are: its state lives in a place of its node.
    """
    is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.is_contiguous()
    if not is_plain or tensor.nbytes < mmap.PAGESIZE:
        return torch.zeros_like(tensor)
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=tensor.dtype).untyped_storage()
    # No view of another tensor, which would keep the memory after this one has left it.
    return torch.empty(0, dtype=tensor.dtype).set_(memory, 0, tensor.shape, tensor.stride())


def refuse_unshared(module: nn.Module) -> None:
    """Raise StateError for a module whose forward writes state that no other rank holds.

    These are the norms that track running statistics, in whatever mode they are.
    """
    for name, each in module.named_modules():
        if isinstance(each, _NormBase) and each.track_running_stats:
            raise StateError(
                f"module {name!r} ({type(each).__name__}) tracks running statistics, which no "
                "other rank holds and a step that is run again would change twice; set "
                "track_running_stats=False or use GroupNorm, LayerNorm or RMSNorm"
            )


def _first_moments(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    keys = ["exp_avg", "exp_avg_sq"]
    if group["amsgrad"]:
        keys.append("max_exp_avg_sq")
    moments = {key: make_zeros(parameter.detach()) for key in keys}
    return {"step": _first_count(parameter, group), **moments}


def _first_count(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the number of steps, where and in the type that torch counts them."""
    is_double = torch.get_default_dtype() == torch.float64 and not group["fused"]
    dtype = torch.float64 if is_double else torch.float32
    if group["capturable"] or group["fused"]:
        return torch.zeros((), dtype=dtype, device=parameter.device)
    return torch.zeros((), dtype=dtype)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in sorted(group) if key not in {"params", "param_names"}}


def _allowed_names() -> str:
    return " or ".join(each.__name__ for each in _ALLOWED)

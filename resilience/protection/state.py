"""The state of a protected program: what the gate covers, and what is copied with each step.

Parameters, optimizers' tensors and averaged models change behind the gate alone, so a step that is
run again finds them as they were. Buffers and all small state may change anywhere in a step: these
are copied before it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilience.errors import StateError
from resilience.state.view import NamedTensor

_TALKING = ("torch.distributed.optim", "deepspeed.")
"""Packages whose optimizers communicate in their step."""
_VERSION = attrgetter("_version")
"""torch counts the writes to a tensor."""


@runtime_checkable
class Stateful(Protocol):
    """Whatever can say its state and take it back: a scheduler, a scaler, a sampler."""

    def state_dict(self) -> Any:
        """Return the state: numbers, text, tensors, and lists and dicts of these."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over what `state_dict` returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Small state and buffers before a step."""

    small: Any
    buffers: list[Tensor]


class ProtectedState:
    """The state of one rank, sharing the program's memory; a StateView.

    `also` are modules, and objects with `state_dict` and `load_state_dict`. Raises StateError for
    one that is neither, and for small state that no other process could be given.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], also: Sequence[object]
    ) -> None:
        self.replica, self.shard = 0, ""
        self.cursor: dict[str, Any] = {}
        """Plain data of the loop's, which travels with the state."""
        self._optimizers = list(optimizers)
        modules = [each for each in also if isinstance(each, nn.Module)]
        self._modules = {"model": model, **{f"also{n}": each for n, each in enumerate(modules)}}
        self._all = [each for root in self._modules.values() for each in root.modules()]
        """Walked once: a walk over a large model's modules takes milliseconds."""
        self._small = [each for each in also if not isinstance(each, nn.Module)]
        for each in self._small:
            if not isinstance(each, Stateful):
                raise StateError(
                    f"also has a {type(each).__name__}; allowed: modules, and objects with "
                    "state_dict and load_state_dict"
                )
        self._names: dict[int, str] = {}
        for root, module in self._modules.items():
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), f"{root}/parameter/{name}")
        self._parameters = [p for module in self._modules.values() for p in module.parameters()]
        self._has_parts = any(isinstance(each, DTensor) for each in self._parameters)
        self._check_optimizers(model)
        self._shape = self._read_shape()
        self.write_rest(self.read_rest())

    # ---- what StateView asks

    def take_place(self, replica: int, shard: str) -> None:
        """Note which copy of the state this rank has a part of, and which part."""
        self.replica, self.shard = replica, shard

    def move_cursor(self, cursor: dict[str, Any]) -> None:
        """Note plain data that travels with the state."""
        self.cursor = cursor

    def tensors(self) -> list[NamedTensor]:
        """Return the local part of all parameters, buffers and optimizers' tensors."""
        with torch.no_grad():
            return [NamedTensor(name=name, tensor=_local(each)) for name, each in self._entries()]

    def read_rest(self) -> dict[str, Any]:
        """Return the small state as JSON data."""
        return {"cursor": dict(self.cursor), "small": _encode(self._read_small())}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take over what `read_rest` returned on another rank."""
        self.cursor = dict(rest["cursor"])
        self._write_small(_decode(rest["small"]))

    def describe(self) -> str:
        """Return what the optimizers have made in their steps.

        Raises StateError for what no other process could be given.
        """
        rows = []
        for number, optimizer in enumerate(self._optimizers):
            for parameter, state in optimizer.state.items():
                name, kind = self._names.get(id(parameter)), type(optimizer).__name__
                if name is None:
                    raise StateError(f"{kind} keeps state of {parameter!r}, which is no parameter")
                rows += [[number, name, key, *_kind(value)] for key, value in state.items()]
        try:
            return json.dumps(rows)
        except TypeError as error:
            raise StateError(
                f"an optimizer keeps something for a parameter that is neither a tensor nor plain "
                f"data: {error}; take another optimizer"
            ) from error

    def grow(self, description: str) -> None:
        """Make what another rank's optimizers have made, to receive into; the rest of it goes."""
        parameters = {self._names[id(each)]: each for each in self._parameters}
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for number, name, key, kind, value, dtype in json.loads(description):
            parameter = parameters[name]
            if kind == "plain":
                made: Any = value
            elif kind == "sharded":
                made = torch.zeros_like(parameter.detach(), dtype=getattr(torch, dtype))
            else:
                made = torch.zeros(value, dtype=getattr(torch, dtype), device=kind)
            self._optimizers[number].state[parameter][key] = made

    # ---- what ranks compare

    def count_writes(self) -> int:
        """Return a number that each write to a parameter raises."""
        own: Iterable[Tensor] = self._parameters
        if self._has_parts:
            own = (p._local_tensor if isinstance(p, DTensor) else p for p in own)  # noqa: SLF001
        return sum(map(_VERSION, own))

    def digest_also(self) -> str:
        """Return digests of optimizers' options and of what `also` has; equal on all ranks."""
        names = ["options of optimizers", *(type(each).__name__ for each in self._small)]
        parts = [_read_compared(each) for each in self._small]
        found = []
        for name, part in zip(names, (self._read_groups(), *parts), strict=True):
            digest = hashlib.blake2b(digest_size=4)
            update_digest(digest, part)
            found.append(f"{name} {digest.hexdigest()}")
        return ", ".join(found)

    # ---- a step that is run again

    def snapshot(self) -> Snapshot:
        """Return a copy of all that a step may change before its gate.

        Raises StateError where requires_grad, parameter groups or forms of buffers have changed.
        """
        if self._read_shape() != self._shape:
            raise StateError(
                "requires_grad, an optimizer's parameters, or a buffer's shape or type have "
                "changed since protect, which a process that joins does not see; set them before"
            )
        buffers = [each.detach().clone() for each in self._buffers()]
        small = self._read_small()
        owners = zip(self._small, small.pop("also"), strict=True)
        also = [
            each if hasattr(own, "gives_copies") else copy.deepcopy(each) for own, each in owners
        ]
        small, cursor = copy.deepcopy((small, self.cursor))
        return Snapshot(small=({**small, "also": also}, cursor), buffers=buffers)

    def restore(self, snapshot: Snapshot) -> None:
        """Take back a copy."""
        small, self.cursor = copy.deepcopy(snapshot.small)
        self._write_small(small)
        with torch.no_grad():
            for buffer, before in zip(self._buffers(), snapshot.buffers, strict=True):
                buffer.copy_(before)

    def read_modes(self) -> str:
        """Return a digit for each module, 1 where it is in training mode."""
        return "".join("1" if each.training else "0" for each in self._all)

    def write_modes(self, modes: str) -> None:
        """Take back what `read_modes` returned."""
        for module, digit in zip(self._all, modes, strict=True):
            module.train(digit == "1")

    # ---- parts

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for root, module in self._modules.items():
            own: dict[str, Tensor] = {}
            own |= {f"{root}/parameter/{name}": each for name, each in module.named_parameters()}
            own |= {f"{root}/buffer/{name}": each for name, each in module.named_buffers()}
            for name, each in own.items():
                if id(each) not in seen:
                    seen.add(id(each))
                    yield name, each
        for number, optimizer in enumerate(self._optimizers):
            found = {self._names[id(each)]: state for each, state in optimizer.state.items()}
            for name in sorted(found):
                for key in sorted(found[name]):
                    if isinstance(found[name][key], Tensor):
                        yield f"optimizer{number}/{name}/{key}", found[name][key]

    def _buffers(self) -> Iterator[Tensor]:
        # Read anew: a forward may put another tensor in a buffer's place.
        own = (each for module in self._all for each in module._buffers.values())  # noqa: SLF001
        return (each for each in own if each is not None)

    def _read_small(self) -> dict[str, Any]:
        return {
            "groups": self._read_groups(),
            "also": [each.state_dict() for each in self._small],  # type: ignore[attr-defined]
            "training": self.read_modes(),
        }

    def _read_groups(self) -> list[Any]:
        return [
            [{key: each[key] for key in each if key != "params"} for each in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def _write_small(self, small: dict[str, Any]) -> None:
        for optimizer, groups in zip(self._optimizers, small["groups"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        self.write_modes(small["training"])
        for each, state in zip(self._small, small["also"], strict=True):
            each.load_state_dict(state)  # type: ignore[attr-defined]
        for scaler in scalers(self._small):
            # Its state_dict leaves out that unscale_ was called: a second call is refused.
            scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)  # noqa: SLF001

    def _read_shape(self) -> tuple[list[bool], list[int], list[Any]]:
        """Return what a loop may not change: trained parameters, their groups, forms of buffers."""
        trained = [each.requires_grad for each in self._parameters]
        groups = [len(g["params"]) for o in self._optimizers for g in o.param_groups]
        forms = [(each.shape, each.dtype) for each in self._buffers()]
        return trained, groups, forms

    def _check_optimizers(self, model: nn.Module) -> None:
        updated: set[int] = set()
        for optimizer in self._optimizers:
            if any(each.__module__.startswith(_TALKING) for each in type(optimizer).__mro__):
                raise StateError(
                    f"{type(optimizer).__name__} communicates in its step, where a rank may be "
                    "alone; take a plain optimizer, with fully_shard to save memory"
                )
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    updated.add(id(parameter))
                    if id(parameter) not in self._names:
                        raise StateError(
                            f"{type(optimizer).__name__} updates a parameter of shape "
                            f"{tuple(parameter.shape)} that is not in the model; give protect the "
                            "module that has it, in also="
                        )
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not any(
                isinstance(each, LRScheduler) and unwrap(each.optimizer) is optimizer
                for each in (getattr(own, "scheduler", own) for own in self._small)
            ):
                raise StateError(
                    f"a scheduler of {type(optimizer).__name__} is not in also=: add it, else a "
                    "step that is run again steps it twice"
                )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in updated:
                raise StateError(
                    f"no optimizer that protect was given updates {name!r}; give it all optimizers "
                    "of the model, or set requires_grad=False"
                )


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer behind accelerate's, which keeps no state of its own."""
    if type(optimizer).__module__.startswith("accelerate."):
        own: Optimizer = optimizer.optimizer  # type: ignore[attr-defined]
        return own
    return optimizer


def scalers(also: Sequence[object]) -> Iterator[GradScaler]:
    """Yield the GradScalers among objects, and those that an object wraps in an attribute."""
    for each in also:
        for own in (each, *getattr(each, "__dict__", {}).values()):
            if isinstance(own, GradScaler):
                yield own


def update_digest(digest: Any, value: Any) -> None:
    """Add a value of a state_dict to a digest, whatever it shares with others in memory."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(repr(key).encode())
            update_digest(digest, each)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} parts".encode())
        for each in value:
            update_digest(digest, each)
    elif isinstance(value, Tensor):
        flat = _local(value).cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (set, frozenset)):
        digest.update(repr(sorted(map(repr, value))).encode())
    else:
        digest.update(repr(value).encode())


def _read_compared(own: Any) -> Any:
    """Return the state of an object that is the same on all ranks."""
    return own.compared_state() if hasattr(own, "compared_state") else own.state_dict()


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _kind(value: Any) -> tuple[str, Any, str]:
    if isinstance(value, DTensor):
        return "sharded", None, _name_of(value.dtype)
    if isinstance(value, Tensor):
        return value.device.type, list(value.shape), _name_of(value.dtype)
    return "plain", value, ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode(small: Any) -> str:
    buffer = io.BytesIO()
    torch.save(small, buffer)
    return b64encode(buffer.getvalue()).decode()


def _decode(text: str) -> Any:
    try:
        return torch.load(io.BytesIO(b64decode(text)), weights_only=True)
    except Exception as error:  # its own message is about files
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise StateError(
            "a state_dict in also= has an object that no other process can be given: "
            f"{reason}; allowed: numbers, text, tensors, and lists and dicts of these"
        ) from error

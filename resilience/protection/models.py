"""Models as the program has made them, and what each kind needs beside the gate."""

# ruff: noqa: SLF001 - torch has no public way into DDP's reducer

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from resilience.comm.reducer import GradientReducer
from resilience.errors import StateError
from resilience.inprocess.lasting import LastingGroup
from resilience.protection.fsdp_step import end_waits, is_in_order, leave_step, mesh_sizes
from resilience.script import rank_info
from resilience.state.torch_state import refuse_unshared


class Binding(Protocol):
    """What a kind of model needs."""

    num_shards: int
    """Ranks that together hold one copy of the model."""
    shares_buffers: bool
    """Whether rank 0's buffers are those of all ranks."""

    def take_groups(self) -> None:
        """Take the groups of a new generation."""

    def clear(self) -> None:
        """Throw away what a broken step has left, gradients too."""

    def share_buffers(self) -> None:
        """Have all ranks hold the same buffers, before the gate."""


class PlainBinding:
    """A module that communicates nothing."""

    num_shards = 1
    shares_buffers = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def take_groups(self) -> None:
        """Do nothing: the model has no group."""

    def clear(self) -> None:
        """Throw gradients away."""
        self._model.zero_grad()

    def share_buffers(self) -> None:
        """Do nothing: the program's ranks have nothing to do with each other."""


class DdpBinding:
    """DistributedDataParallel as it is given, but for its reducer.

    Gradients are summed by a reducer of this package, whose layout is the same in a process that
    joins later. Raises StateError for options of DDP that are not kept exact.
    """

    num_shards = 1

    def __init__(self, ddp: DistributedDataParallel) -> None:
        _check_ddp(ddp)
        shares = getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers)
        if not shares:
            refuse_unshared(ddp.module)
        self._ddp = ddp
        detach(ddp)
        self._reducer = _BackwardReducer(ddp.module)
        self._with_buffers = [each for each in ddp.module.modules() if shares and each._buffers]
        self.shares_buffers = bool(self._with_buffers)
        ddp.register_forward_pre_hook(self._before_forward)

    def take_groups(self) -> None:
        """Take the world's group."""
        self._reducer.take_group()

    def clear(self) -> None:
        """Throw away gradients and what a broken reduction has left."""
        self._reducer.clear()

    def share_buffers(self) -> None:
        """Have all ranks hold rank 0's buffers, as DDP has them before each forward."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        # Read anew: a forward may put another tensor in a buffer's place.
        for module in self._with_buffers:
            for each in module.buffers(recurse=False):
                by_type.setdefault(each.dtype, []).append(each.detach())
        for buffers in by_type.values():
            # By Python, whose waits end with their generation: those of DDP's own call do not.
            flat = torch.cat([each.reshape(-1) for each in buffers])
            dist.broadcast(flat, 0)
            sizes = [each.numel() for each in buffers]
            for each, part in zip(buffers, torch.split(flat, sizes), strict=True):
                each.copy_(part.view_as(each))

    def _before_forward(self, module: nn.Module, given: object) -> None:
        if torch.is_grad_enabled():
            self._reducer.begin_backward(is_last=self._ddp.require_backward_grad_sync)


def detach(ddp: DistributedDataParallel) -> None:
    """Take DDP's reducer away, which holds its first group for ever."""
    ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
    ddp._use_python_reducer = True
    setattr(ddp, "_force_to_disable_cpp_reducer", True)  # noqa: B010 - for torch before 2.9
    ddp.reducer = ddp.logger = None  # type: ignore[assignment]


class FsdpBinding:
    """FSDP2 over a mesh of copies and shards, as it is given.

    Raises StateError for a mesh without copies: a lost shard would be nowhere.
    """

    shares_buffers = False

    def __init__(self, model: FSDPModule) -> None:
        assert isinstance(model, nn.Module)
        self._model: Any = model
        sizes = mesh_sizes(model)
        if len(sizes) != 2:
            raise StateError(
                f"fully_shard over a mesh of {len(sizes)} axes keeps each shard once; give it a "
                'mesh of two, init_device_mesh("cpu", (num_copies, num_shards), '
                'mesh_dim_names=("copies", "shards")), with accelerate '
                "ParallelismConfig(dp_replicate_size=num_copies, dp_shard_size=num_shards)"
            )
        if not hasattr(model, "set_custom_reduce_scatter"):
            raise StateError(
                f"fully_shard of torch {torch.__version__} has no set_custom_reduce_scatter, by "
                "which its waits end with a fault; take a newer torch"
            )
        if not is_in_order(model):
            raise StateError(
                "fully_shard over a mesh that does not have all ranks of the run in their order; "
                'make it with init_device_mesh("cpu", (num_copies, num_shards), ...)'
            )
        refuse_unshared(model)
        self.num_shards = sizes[1]
        end_waits(model, lambda total: None)

    def take_groups(self) -> None:
        """Forget the step that a fault has broken; groups and gradients stay."""
        leave_step(self._model)

    def clear(self) -> None:
        """Throw away gradients and what a broken step has left."""
        leave_step(self._model)
        self._model.zero_grad()

    def share_buffers(self) -> None:
        """Do nothing: FSDP2 leaves buffers to the program."""


def bind(model: nn.Module) -> Binding:
    """Return what a model needs, by its kind; raises StateError for one that is not kept exact."""
    if any(each.is_cuda for each in model.parameters()):
        raise StateError(
            "the model is on a GPU; protect keeps models on the CPU exact so far, and the trainer "
            "of the recipes those on GPUs"
        )
    _check_kind(model)
    if isinstance(model, DistributedDataParallel):
        return DdpBinding(model)
    if isinstance(model, FSDPModule):
        return FsdpBinding(model)
    if rank_info().world_size > 1:
        raise StateError(
            f"the model is a {type(model).__name__}, whose ranks do not sum their gradients; "
            "wrap it in DistributedDataParallel or fully_shard before protect"
        )
    return PlainBinding(model)


def _check_kind(model: nn.Module) -> None:
    """Raise StateError for what no binding keeps exact, whatever it is wrapped in."""
    made_in = {base.__module__ for each in model.modules() for base in type(each).__mro__}
    if any(name.partition(".")[0] == "deepspeed" for name in made_in):
        raise StateError(
            "a DeepSpeed engine sums gradients and steps by itself; wrap its module in "
            "DistributedDataParallel or fully_shard, and step with an optimizer of torch's"
        )
    for each in model.modules():
        if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None:
            raise StateError(
                "a module is compiled; a process that joins compiles for the shapes that it sees "
                "first, and its kernels may round in another way: leave torch.compile out"
            )
    for name, parameter in model.named_parameters():
        part: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if is_traceable_wrapper_subclass(part):
            raise StateError(
                f"parameter {name!r} is a {type(part).__name__}, which is no plain memory that "
                "another process could be given; train plain tensors"
            )


class _BackwardReducer(GradientReducer):
    """Averages in the backward pass that follows a forward for which DDP would reduce."""

    _is_queued = False

    def begin_backward(self, *, is_last: bool) -> None:
        """Expect a backward pass; it reduces where it is the last of its step."""
        self.expect(is_last=is_last)
        self._is_queued = False

    def _note(self, bucket: Any, parameter: Tensor) -> None:
        LastingGroup.check_now("backward()")
        if self._is_reducing and not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._end_backward)
        super()._note(bucket, parameter)

    def _end_backward(self) -> None:
        if num_missing := self.num_missing:
            raise StateError(
                f"{num_missing} parameters of the model got no gradient; leave out of the model "
                "those that the loss does not depend on, or set requires_grad=False"
            )
        self._finish()
        self._is_reducing = False


def _check_ddp(ddp: DistributedDataParallel) -> None:
    if ddp._use_python_reducer:
        raise StateError("the model is protected already; one protect takes all models of a run")
    refused = {
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "a communication hook": bool(ddp._comm_hooks),
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(getattr(ddp, "_delay_all_reduce_params", ())),
    }
    found = [name for name, is_set in refused.items() if is_set]
    if found:
        raise StateError(
            f"DistributedDataParallel with {' and '.join(found)} is not kept exact through faults; "
            "leave it out"
        )

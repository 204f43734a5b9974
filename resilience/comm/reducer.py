"""Gradients of whole copies, summed in buckets whose layout never changes.

DistributedDataParallel lays its buckets out anew after its first iteration, and a sum over ranks
depends on where in a bucket an element lies: a process that has just joined would sum other bits
than one that has been there. DDP also keeps its group in C++, where the group cannot be dropped
without a deadlock. Here the layout is a function of the parameters alone, and a group is a plain
attribute. Overlap with the backward pass is DDP's: a bucket leaves when its last gradient is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup, Work

from resilience.comm.world import drop_groups
from resilience.errors import StateError

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(slots=True)
class _Bucket:
    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    num_missing: int = 0
    work: Work | None = None


class GradientReducer:
    """Averages the gradients of a module over all ranks, in the last micro batch of a step.

    A parameter without a gradient takes part with zeros. Not for sparse gradients. `on_sum` is
    given the sum of what this rank puts into each bucket: where a value that is not finite is the
    rank's own, it is seen there, and after the reduction everywhere.
    """

    def __init__(
        self, module: nn.Module, *, on_sum: Callable[[Tensor], None] | None = None
    ) -> None:
        self._on_sum = on_sum
        self._buckets = _plan_buckets(each for each in module.parameters() if each.requires_grad)
        self._group: ProcessGroup | None = None
        self._is_reducing = False
        self._num_sent = 0
        self._arrived: set[int] = set()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                arrival = partial(self._note, bucket)
                parameter.register_post_accumulate_grad_hook(arrival)  # type: ignore[no-untyped-call]
        self.take_group()

    def take_group(self) -> None:
        """Take the default group of the open world."""
        before, self._group = [self._group], dist.group.WORLD
        drop_groups(before)

    def clear(self) -> None:
        """Drop what a broken step has left, gradients too.

        A bucket that a collective still writes to is left to that collective, and replaced.
        """
        self._is_reducing = False
        for bucket in self._buckets:
            if bucket.work is not None and not bucket.work.is_completed():
                bucket.flat, bucket.views = _lay_out(bucket.parameters)
            bucket.work = None
            for parameter in bucket.parameters:
                parameter.grad = None

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Add up gradients in the block, and average them over the ranks if it is the last.

        Ends when the averages are in the parameters' `grad`.
        """
        self.expect(is_last=is_last)
        try:
            yield
            if is_last:
                self._finish()
        finally:
            self._is_reducing = False

    def expect(self, *, is_last: bool) -> None:
        """Expect a backward pass, whose gradients are reduced if it is the last of a step."""
        self._is_reducing = is_last
        self._num_sent = 0
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)

    @property
    def num_missing(self) -> int:
        """Return how many parameters have no gradient yet in the pass that is reduced."""
        return sum(each.num_missing for each in self._buckets)

    def _note(self, bucket: _Bucket, parameter: Tensor) -> None:
        """Count a gradient that is complete, and send the buckets that are whole with it."""
        if not self._is_reducing:
            return
        if id(parameter) in self._arrived:
            raise StateError(
                "a parameter's gradient came twice in one backward pass that reduces; do one "
                "backward pass in each micro batch"
            )
        self._arrived.add(id(parameter))
        bucket.num_missing -= 1
        # In one order on all ranks.
        while self._num_sent < len(self._buckets) and not self._next.num_missing:
            self._send(self._next)

    @property
    def _next(self) -> _Bucket:
        return self._buckets[self._num_sent]

    def _send(self, bucket: _Bucket) -> None:
        self._num_sent += 1
        gradients, views = [], []
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                gradients.append(parameter.grad)
                views.append(view)
        if views:
            torch._foreach_copy_(views, gradients)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
        assert self._group is not None
        bucket.flat.mul_(1 / self._group.size())
        if self._on_sum is not None:
            self._on_sum(bucket.flat.sum())
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        while self._num_sent < len(self._buckets):
            self._send(self._next)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None


def _plan_buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Fill buckets in about the order in which gradients come; a small one first."""
    members: list[list[nn.Parameter]] = []
    size, size_max = 0, 0
    for parameter in reversed(list(parameters)):
        is_same = bool(members) and _kind(members[-1][0]) == _kind(parameter)
        if not is_same or size >= size_max:
            size, size_max = 0, BUCKET_BYTES if members else FIRST_BUCKET_BYTES
            members.append([])
        members[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [_Bucket(each, *_lay_out(each)) for each in members]


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _lay_out(parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor and each parameter's part of it in the parameter's shape."""
    sizes = [each.numel() for each in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    parts = torch.split(flat, sizes)
    return flat, [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]

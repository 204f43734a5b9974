"""Gradients of whole copies, whose sum has the same bits at any number of ranks.

The terms of a step are its micro batches, each with a number in the whole step. Each rank adds up
the tree's blocks within its own ones; then each rank is sent, of every rank's blocks, one part of
all values, adds these up in the tree's order, and gives the sum to all. That is as many bytes as a
ring takes where each rank has one block, and nothing overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroup

from resilience.comm.sum_tree import Block, add_up, find_blocks, find_share, push
from resilience.comm.world import drop_groups


class TreeReducer:
    """Sums the gradients of a module over all micro batches of a step, of all ranks.

    `num_terms` is the number of micro batches of a step. A parameter without a gradient takes part
    with zeros. All parameters have one dtype and device. `on_sum` is given the sum of each block
    that this rank sends: where a value that is not finite is the rank's own, it is seen there.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        num_terms: int,
        on_sum: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._sizes = [each.numel() for each in self._parameters]
        self.num_terms = num_terms
        self._on_sum = on_sum
        self._group: ProcessGroup | None = None
        self._blocks: list[tuple[Block, Tensor]] = []
        self._spare: list[Tensor] = []
        """Memory for terms to come."""
        self.take_group()

    def take_group(self) -> None:
        """Take the default group of the open world; sums that are done stay."""
        before, self._group = [self._group], dist.group.WORLD
        drop_groups(before)
        assert self._group is not None
        self._share = find_share(
            self.num_terms, rank=self._group.rank(), world_size=self._group.size()
        )
        # Other ranks of other sizes divide the values otherwise.
        self._part = -(-sum(self._sizes) // self._group.size())
        self._blocks, self._spare = [], []

    def clear(self) -> None:
        """Drop what a broken step has left, gradients too; a collective may still write to it."""
        self._blocks, self._spare = [], []
        for parameter in self._parameters:
            parameter.grad = None

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Take the gradients of the block as the step's next term; sum all up after the last.

        Ends when the sums are in the parameters' `grad`.
        """
        number = self._share.start + sum(block.size for block, _ in self._blocks)
        term = self._spare.pop().zero_() if self._spare else self._make()
        self._lend(term)
        yield
        push(self._blocks, number, term, self._add)
        if is_last:
            self._lend(self._exchange())
            self._spare += [each for _, each in self._blocks]
            self._blocks = []

    def sum_up(self, values: Sequence[Tensor], others: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of one value for each micro batch, and that of whole numbers."""
        every = torch.zeros(self.num_terms + 1, dtype=others.dtype, device=others.device)
        every[self._share.start : self._share.stop] = torch.stack(list(values))
        every[-1] = others
        # Nothing is added to a value but zeros.
        dist.all_reduce(every, group=self._group)
        terms = {Block(number, 1): each for number, each in enumerate(every[:-1])}
        return add_up(terms, self.num_terms, torch.add), every[-1]

    def _make(self) -> Tensor:
        assert self._group is not None
        one = self._parameters[0]
        return torch.zeros(self._part * self._group.size(), dtype=one.dtype, device=one.device)

    def _lend(self, values: Tensor) -> None:
        """Have the parameters' gradients be these values."""
        parts = torch.split(values[: sum(self._sizes)], self._sizes)
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        self._spare.append(right)
        return left.add_(right)

    def _exchange(self) -> Tensor:
        assert self._group is not None
        size, part = self._group.size(), self._part
        own = [values for _, values in self._blocks]
        if self._on_sum is not None:
            for values in own:
                self._on_sum(values.sum())
        shares = [find_share(self.num_terms, rank=rank, world_size=size) for rank in range(size)]
        blocks = [find_blocks(share) for share in shares]
        sent = torch.cat([values.view(size, part) for values in own], dim=1).view(-1)
        told = torch.empty(part * sum(map(len, blocks)), dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(
            told,
            sent,
            output_split_sizes=[part * len(each) for each in blocks],
            input_split_sizes=[part * len(own)] * size,
            group=self._group,
        )
        parts = iter(torch.split(told, part))
        found = {block: next(parts) for each in blocks for block in each}
        total = add_up(found, self.num_terms, lambda left, right: left.add_(right))
        whole = torch.empty(part * size, dtype=sent.dtype, device=sent.device)
        dist.all_gather(list(torch.split(whole, part)), total, group=self._group)
        return whole

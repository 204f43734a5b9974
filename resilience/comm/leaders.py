"""Sums and messages in host memory between all ranks, where torch's default group has no gloo.

A group of gloo's has a socket and an address for each two of its ranks. So the ranks of a node are
one group, led by the lowest of them; LEADERS_MAX leaders in a row are one, led by their lowest, and
so on up to rank 0. A sum goes up through the leaders and comes down again. Two ranks that send to
each other open a group for that.

The groups are of one generation: they meet in its store, and end with it. So no word of an older
one is summed; words of two steps are told apart by the gate's count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, ReduceOptions, Work
from torch.distributed.distributed_c10d import PrefixStore, Store

from resilience.comm.waits import wait_in_slices
from resilience.errors import GroupOpenError

LEADERS_MAX = 32


def find_groups(rank: int, *, world_size: int, num_local_ranks: int) -> list[range]:
    """Return the groups that a rank is in, its node's first; each is led by its first rank."""
    groups, step, size = [], 1, num_local_ranks
    while rank % step == 0 and step < world_size:
        first = rank - rank % (step * size)
        groups.append(range(first, min(first + step * size, world_size), step))
        step, size = step * size, LEADERS_MAX
    return [each for each in groups if len(each) > 1]


class LeaderGroup:
    """What a recovery and its gate ask of a group that takes tensors in host memory.

    Made within `opening`, which owns the connections of each block. Raises GroupOpenError where the
    ranks do not meet within `timeout`, BrokenError once the generation is broken.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        num_local_ranks: int,
        timeout: timedelta,
        collective_timeout: timedelta,
        opening: Callable[[], AbstractContextManager[None]],
        is_broken: Callable[[], bool],
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._collective_timeout = collective_timeout
        self._opening = opening
        self._is_broken = is_broken
        groups = find_groups(rank, world_size=world_size, num_local_ranks=num_local_ranks)
        self._groups = [self._open(f"leaders/{each[0]}/{each.step}", each) for each in groups]
        self._pairs: dict[int, Any] = {}

    def allreduce(self, tensors: list[Tensor]) -> LeaderGroup:
        """Replace a tensor by its sum over all ranks; has ended when it returns."""
        for group in self._groups:
            wait_in_slices(group.reduce(tensors, ReduceOptions()), self._is_broken)
        for group in reversed(self._groups):
            wait_in_slices(group.broadcast(tensors, BroadcastOptions()), self._is_broken)
        return self

    def wait(self) -> None:
        """Return: the sum is there."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to send to a rank, which has to call `recv` or `send` as well."""
        work: Work = self._reach(rank).send(tensors, int(rank > self._rank), tag)
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to receive from a rank."""
        work: Work = self._reach(rank).recv(tensors, int(rank > self._rank), tag)
        return work

    def _reach(self, rank: int) -> Any:
        """Return the group of this rank and another one."""
        if rank not in self._pairs:
            ranks = sorted((self._rank, rank))
            name = f"pair/{ranks[0]}/{ranks[1]}"
            # The other one may have others to serve first, longer than an opening may take.
            self._store.set(f"{name}/{self._rank}", "")
            self._store.wait([f"{name}/{rank}"], self._collective_timeout)
            with self._opening():
                self._pairs[rank] = self._open(name, ranks)
        return self._pairs[rank]

    def _open(self, name: str, ranks: Sequence[int]) -> Any:
        store, own = PrefixStore(name, self._store), ranks.index(self._rank)
        try:
            group = ProcessGroupGloo(store, own, len(ranks), self._timeout)
        except RuntimeError as error:
            raise GroupOpenError(describe_unmet(ranks, self._timeout, error)) from error
        group._set_default_timeout(self._collective_timeout)  # noqa: SLF001
        return group


def describe_unmet(ranks: Sequence[int], timeout: timedelta, error: Exception) -> str:
    """Return what to say of ranks that did not meet."""
    problem = str(error).strip().partition("\n")[0]
    return f"{len(ranks)} ranks did not meet within {timeout.total_seconds():g} s: {problem}"

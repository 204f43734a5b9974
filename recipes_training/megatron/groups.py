"""Megatron's process groups of one generation.

`parallel_state` keeps them in globals of its module and has no call that resets all of them, so
they are put back to what they were at its import. On gloo one group serves all that Megatron asks
for with the same ranks: a fifth of them remain, whose opening is a good part of a recovery.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world

from resilience.comm.world import COLLECTIVE_TIMEOUT, opening_groups

_AT_IMPORT = {
    name: copy.copy(value)
    for name, value in vars(parallel_state).items()
    if name.startswith("_") and not name.startswith("__") and not callable(value)
}


def open_groups(options: Mapping[str, Any], *, is_shared: bool) -> list[ProcessGroup]:
    """Open Megatron's groups over the open world; returns all that this rank has, in order.

    `is_shared`: one group serves all with the same ranks. Whoever calls holds the groups of the
    generation before, until `drop_groups` has them.
    """
    for name, value in _AT_IMPORT.items():
        setattr(parallel_state, name, copy.copy(value))
    with opening_groups(), _sharing() if is_shared else nullcontext():
        parallel_state.initialize_model_parallel(
            create_gloo_process_groups=False,
            distributed_timeout_minutes=COLLECTIVE_TIMEOUT / timedelta(minutes=1),
            **options,
        )
    return list(_world.pg_map)


@contextmanager
def _sharing() -> Iterator[None]:
    """Give those who ask for a group of the same ranks the same one."""
    opened: dict[tuple[int, ...] | None, Any] = {}
    new_group = dist.new_group

    def share(ranks: Any = None, timeout: Any = None, **_: object) -> Any:
        key = None if ranks is None else tuple(ranks)
        if key not in opened:
            opened[key] = new_group(ranks, timeout=timeout)
        return opened[key]

    setattr(dist, "new_group", share)  # noqa: B010 - parallel_state calls it there
    try:
        yield
    finally:
        setattr(dist, "new_group", new_group)  # noqa: B010

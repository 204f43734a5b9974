"""Holds a trainer to its word that an update holds no collective.

Once past the gate, a rank ends its update alone: a collective in its update would wait for ranks
that may be gone, and roll-forward could not work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from resilience.errors import StateError

_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
)


@contextmanager
def forbid_collectives() -> Iterator[None]:
    """Raise StateError at the first collective that this thread issues in the block.

    The collective is not begun. The guard sees those of torch.distributed, of a ProcessGroup,
    functional ones, and those that a DTensor issues by itself; a wait for a functional one counts
    as well. It does not see calls on a bare backend (`ProcessGroupGloo.allreduce`), other threads,
    or collectives within a compiled function, which torch runs uncompiled, if at all, under a
    dispatch mode. Costs some microseconds an operation and changes no bit: meant for the first
    update, not for every one.
    """
    with _Forbid():  # type: ignore[no-untyped-call]
        yield


class _Forbid(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler, in a new process's first update, and all ranks wait for
        # that.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "namespace", None) in _NAMESPACES:
            raise StateError(
                f"the update holds a collective, {func}; an optimizer that communicates cannot be "
                "recovered from replicas: take another, or set resilience.checkpointless to null"
            )
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            # A tensor made of tensors, such as DTensor: what it does by itself comes here again.
            return NotImplemented
        return func(*args, **(kwargs or {}))

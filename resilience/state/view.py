"""What a trainer hands over of its state, whatever framework it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor of the state: the part of it that this rank owns, sharing its memory."""

    name: str
    tensor: Tensor
    full_shape: tuple[int, ...] | None = None
    """Shape of the whole tensor that this is a part of; None: this is all of it."""
    begin: tuple[int, ...] | None = None
    """Where in the whole tensor the part begins, by dim; None: at its begin."""


class StateView(Protocol):
    """The state of one rank. Not thread-safe; used between steps only.

    The same view feeds repair, checkpoints and digests. Ranks that own the same
    shard list the same names, shapes and types in the same order.
    """

    @property
    def replica(self) -> int:
        """Return which full copy of the state this rank belongs to."""

    @property
    def shard(self) -> str:
        """Return which part of the copy this rank owns."""

    def tensors(self) -> Sequence[NamedTensor]:
        """Return all tensors in a fixed order; cheap enough to be called once a recovery."""

    def read_rest(self) -> Mapping[str, Any]:
        """Return the small rest as JSON data: schedules, positions, counters."""

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take over what `read_rest` returned on the rank that sent the state."""


@runtime_checkable
class Movable(Protocol):
    """What a view offers beside, if its tensors can be given other memory."""

    def owners(self) -> Sequence[Tensor] | None:
        """Return what `tensors` lists, in its order, as the very objects that training uses.

        Setting their `data` moves the state; None where that would not move all of it.
        """


@runtime_checkable
class Growing(Protocol):
    """What a view offers beside, if training makes tensors that a new process does not have."""

    def describe(self) -> str:
        """Return which of these tensors there are."""

    def grow(self, description: str) -> None:
        """Make the tensors that another rank's `describe` names; those beside them go."""


@runtime_checkable
class Distributed(Protocol):
    """What a view offers beside, if torch.distributed.checkpoint can save its tensors."""

    def entries(self) -> Mapping[str, Tensor]:
        """Return the tensors by name as torch has them: some may be DTensors."""


@runtime_checkable
class Selective(Protocol):
    """What a view offers beside, if not every state fits it."""

    def check_rest(self, rest: Mapping[str, Any]) -> None:
        """Raise ValueError or TypeError where a state with this rest does not fit."""


@runtime_checkable
class Partial(Protocol):
    """What a view offers beside, if a step may hold tensors that it does not list."""

    def leaves_out(self, name: str) -> bool:
        """Return whether the tensor is left to the views of other ranks, or to nobody on purpose.

        A step with any other tensor that the view does not list is not loaded.
        """


def leaves_out(view: StateView, name: str) -> bool:
    """Return whether a view leaves out a tensor that it does not list."""
    return isinstance(view, Partial) and view.leaves_out(name)


class HasRest(Protocol):
    """Who keeps small data beside a state."""

    rest: dict[str, Any]

    def take_rest(self, rest: dict[str, Any]) -> None:
        """Take over what a state that has arrived brings with it."""


class WrappedView:
    """The tensors of another view; the rest is for classes that are made of this one."""

    def __init__(self, view: StateView) -> None:
        self.replica = view.replica
        self.shard = view.shard
        self.tensors = view.tensors
        self._view = view

    def leaves_out(self, name: str) -> bool:
        """Return whether the view leaves it out."""
        return leaves_out(self._view, name)


class ViewWithRest(WrappedView):
    """A view whose small rest carries that of its keeper as well."""

    def __init__(self, view: StateView, keeper: HasRest) -> None:
        super().__init__(view)
        self._keeper = keeper

    def read_rest(self) -> Mapping[str, Any]:
        """Return both."""
        return {"view": self._view.read_rest(), "recovery": self._keeper.rest}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take over both."""
        self._view.write_rest(rest["view"])
        self._keeper.take_rest(dict(rest["recovery"]))

"""What reading one step for torch.distributed.checkpoint takes, whatever has saved it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from resilience.tiered.errors import FormatError
from resilience.validation import list_some

Place = TypeVar("Place")
"""Where an item lies, as the metadata says."""


def check_asked(metadata: Metadata, plans: Sequence[LoadPlan], *, advice: str = "") -> None:
    """Raise FormatError that names what a step has and no rank asks for."""
    asked = {item.storage_index.fqn for plan in plans for item in plan.items}
    others = [
        name
        for name, each in metadata.state_dict_metadata.items()
        if name not in asked and not (isinstance(each, TensorStorageMetadata) and 0 in each.size)
    ]
    if others:
        raise FormatError(
            f"the step has {list_some(others)}, which the state dict that it is loaded into does "
            f"not have{advice}"
        )


class StepReader(StorageReader, Generic[Place]):
    """What reading a step takes wherever its items lie: they are read shard by shard."""

    def __init__(self, *, allow_partial: bool) -> None:
        """`allow_partial` leaves out what no rank's state dict has; otherwise that is an error."""
        self._places: Mapping[MetadataIndex, Place] = {}
        self._allow_partial = allow_partial
        self._metadata: Metadata

    @abstractmethod
    def shard_of(self, place: Place) -> str | int:
        """Return which shard an item lies in."""

    @abstractmethod
    def read_items(self, items: Sequence[tuple[ReadItem, Place]], planner: LoadPlanner) -> None:
        """Copy items of one shard into the planner's tensors."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of an earlier load."""
        self._places = {}

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over where the items lie."""
        self._places = metadata.storage_data
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are; FormatError where they would drop a part of the step."""
        if not self._allow_partial:
            advice = "; allow_partial=True of the reader leaves that out"
            check_asked(self._metadata, plans, advice=advice)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy all items of the plan into the planner's tensors; done when this returns."""
        by_shard: dict[str | int, list[tuple[ReadItem, Place]]] = {}
        for each in plan.items:
            place = self._places[each.storage_index]
            by_shard.setdefault(self.shard_of(place), []).append((each, place))
        for items in by_shard.values():
            self.read_items(items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any: the reader itself was told where to read."""
        return True

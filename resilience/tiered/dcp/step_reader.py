"""What reading one step for torch.distributed.checkpoint takes, whatever has saved it."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

Place = TypeVar("Place")
"""Where an item lies, as the metadata says."""


class StepReader(StorageReader, Generic[Place]):
    """What reading a step takes wherever its items lie: they are read shard by shard."""

    def __init__(self) -> None:
        self._places: Mapping[MetadataIndex, Place] = {}

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

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
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

"""Writes a step for torch.distributed.checkpoint: `dcp.save` and `async_save`."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from resilience.state.view import NamedTensor
from resilience.tiered.attempts import check_kept, join_known, narrow_known, plan_attempt
from resilience.tiered.client import TieredClient
from resilience.tiered.dcp.checkpoint_id import (
    name_checkpoint,
    parse_checkpoint_id,
    split_checkpoint_id,
)
from resilience.tiered.dcp.metadata import METADATA, ItemPlace, encode_metadata
from resilience.tiered.packing import describe_shard
from resilience.tiered.saver import Saving, write_shard
from resilience.tiered.shard import ShardId, ShardMeta

_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""What torch's own writer says of the metadata, where it says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a rank writes, as the coordinator has planned it."""

    step: int
    generation: int
    shard: str
    num_shards: int


class TieredWriter(StorageWriter):
    """Writes one step of the client's namespace; `checkpoint_id` is NAMESPACE/STEP, or STEP alone.

    All ranks agree on a generation that nothing of this step has yet, at least `generation`: what
    an earlier save has left unfinished is replaced, and never mixed in. A step older than a whole
    one is refused, as it would not be kept; so is one that is whole, unless `overwrite` is set.
    Where a run goes on from an earlier step it says so first: `client.go_back`.

    Errors are TieredErrors, on the rank that they happen to: no room in the node's memory, the
    daemon gone, a step that is not taken. DCP then fails on all ranks. ValueError where no step
    was named, for `use_collectives=False`, and for a planner with `enable_plan_caching`.
    """

    def __init__(
        self,
        client: TieredClient,
        *,
        step: int | None = None,
        generation: int = 0,
        overwrite: bool = False,
    ) -> None:
        self._client = client
        self._step = step
        self._least = generation
        self._generation = generation
        self._may_overwrite = overwrite
        self.save_id = str(uuid4())
        """Of one save alone; in the metadata."""
        self._num_shards = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, of another step where it is named."""
        if checkpoint_id is not None:
            self._step = parse_checkpoint_id(checkpoint_id, self._client.namespace)
        self.save_id = str(uuid4())

    @property
    def checkpoint_id(self) -> str | None:
        """Return which step is written; None where none was named yet."""
        return name_checkpoint(self._client.namespace, self._step)

    def storage_meta(self) -> StorageMeta:
        """Return what the metadata says of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the save is one that this writer can do."""
        if self._step is None:
            raise ValueError("no step is named; give TieredWriter step=..., or a checkpoint_id")
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives is False; TieredWriter has ranks agree on one step")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add what this rank's node knows of the steps that were begun."""
        if not getattr(plan, "usable", True):
            raise ValueError(
                "the planner has enable_plan_caching set; TieredWriter plans each save anew"
            )
        known = narrow_known(self._client.known_steps(), self._own_step)
        return dataclasses.replace(plan, storage_data=known)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's shard, under a generation that is free on all nodes."""
        known = join_known(each.storage_data for each in plans)
        self._num_shards = len(plans) + 1
        self._generation = plan_attempt(
            self._own_step, known, least=self._least, may_overwrite=self._may_overwrite
        )
        return [
            dataclasses.replace(plan, storage_data=self._part(f"rank-{rank}"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy all items into the node's memory; done when this returns."""
        part: _Part = plan.storage_data
        tensors = [
            NamedTensor(name=each.index.fqn, tensor=_resolve(each, planner)) for each in plan.items
        ]
        meta = self._put(part, tensors)
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=place.num_bytes,
                storage_data=ItemPlace(
                    shard=part.shard,
                    offset=place.offset,
                    num_bytes=place.num_bytes,
                    shape=place.shape,
                    dtype=place.dtype,
                ),
            )
            for item, place in zip(plan.items, meta.tensors, strict=True)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the step whole.

        Raises ValueError for a planner whose data is not plain, and StaleError where the step is
        not kept, as a later one has become whole meanwhile.
        """
        places = {each.index: each.storage_data for rank in results for each in rank}
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = _VERSION
        content = torch.frombuffer(bytearray(encode_metadata(metadata, places)), dtype=torch.uint8)
        self._put(self._part(METADATA), [NamedTensor(name=METADATA, tensor=content)])
        check_kept(self._own_step, self._generation, self._client.known_steps())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return split_checkpoint_id(checkpoint_id) is not None

    @property
    def _own_step(self) -> int:
        assert self._step is not None
        return self._step

    def _part(self, shard: str) -> _Part:
        return _Part(
            step=self._own_step,
            generation=self._generation,
            shard=shard,
            num_shards=self._num_shards,
        )

    def _put(self, part: _Part, tensors: Sequence[NamedTensor]) -> ShardMeta:
        shard_id = ShardId(
            namespace=self._client.namespace,
            step=part.step,
            generation=part.generation,
            shard=part.shard,
        )
        meta = describe_shard(shard_id, tensors, num_shards=part.num_shards, rest={})
        write_shard(self._client, meta, tensors, Saving(part.step))
        return meta


def _resolve(item: WriteItem, planner: SavePlanner) -> Tensor:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        return torch.frombuffer(bytearray(cast(io.BytesIO, data).getbuffer()), dtype=torch.uint8)
    return cast(Tensor, data).detach()

"""Storage for torch.distributed.checkpoint: `dcp.save`, `async_save` and `load` over the tiers.

Each rank's items are one shard, in the order of its plan, and one more holds the metadata,
written last by the coordinator: a step without it is not whole. Nothing here is pickled but
what a planner itself hands over as bytes.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from resilience.state.digest import flat_bytes
from resilience.state.view import NamedTensor
from resilience.tiered.client import Loan, TieredClient
from resilience.tiered.dcp_metadata import ItemPlace, decode_metadata, encode_metadata
from resilience.tiered.errors import LostError, TierError
from resilience.tiered.loader import COPIES_MAX, READ_TIMEOUT_S, newest_whole
from resilience.tiered.packing import describe_shard
from resilience.tiered.saver import Saving, write_shard
from resilience.tiered.shard import ShardId, ShardMeta, is_intact, num_pieces, pieces_of

METADATA = "metadata"
"""Name of the shard that makes a step whole."""

Bytes = NDArray[np.uint8]
T = TypeVar("T")
Place = TypeVar("Place")
"""Where an item lies, as the metadata says."""


class TieredWriter(StorageWriter):
    """Writes one step. The client's namespace is the checkpoint's name; `checkpoint_id` is unused.

    Raises TieredError where the node's memory has no room or the daemon is gone, on the
    rank that it happens to; DCP then fails on all.
    """

    def __init__(self, client: TieredClient, *, step: int, generation: int = 0) -> None:
        self._client = client
        self._step = step
        self._generation = generation
        self._num_shards = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one step."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: shards are begun when their size is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's shard."""
        self._num_shards = len(plans) + 1
        return [
            dataclasses.replace(plan, storage_data=(f"rank-{rank}", self._num_shards))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy all items into the node's memory; done when this returns."""
        shard, num_shards = plan.storage_data
        tensors = [
            NamedTensor(name=each.index.fqn, tensor=_resolve(each, planner)) for each in plan.items
        ]
        meta = self._put(shard, num_shards, tensors)
        results = [
            WriteResult(
                index=item.index,
                size_in_bytes=place.num_bytes,
                storage_data=ItemPlace(
                    shard=shard,
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
        """Make the step whole. Raises ValueError for a planner whose data is not plain."""
        places = {each.index: each.storage_data for rank in results for each in rank}
        text = encode_metadata(metadata, places)
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._put(METADATA, self._num_shards, [NamedTensor(name=METADATA, tensor=content)])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any: the client says where to write."""
        return True

    def _put(self, shard: str, num_shards: int, tensors: Sequence[NamedTensor]) -> ShardMeta:
        shard_id = ShardId(
            namespace=self._client.namespace,
            step=self._step,
            generation=self._generation,
            shard=shard,
        )
        meta = describe_shard(shard_id, tensors, num_shards=num_shards, rest={})
        write_shard(self._client, meta, tensors, Saving(self._step))
        return meta


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


class TieredReader(StepReader[ItemPlace]):
    """Reads one step, the newest whole one by default, whoever saved it and with how many ranks.

    Ranks of several nodes may see different newest steps for a moment: give them one.
    """

    def __init__(
        self,
        client: TieredClient,
        *,
        step: int | None = None,
        generation: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._client = client
        self._step = step
        self._generation = generation
        self._timeout_s = timeout_s

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the step's metadata; raises LostError where there is no whole step."""
        if self._step is None:
            newest = newest_whole(self._client)
            if newest is None:
                raise LostError("there is no whole step to load")
            self._step, self._generation = newest.step, newest.generation
        return decode_metadata(self._read(METADATA, lambda memory: memory.tobytes()))

    def shard_of(self, place: ItemPlace) -> str:
        """Return the shard's name."""
        return place.shard

    def read_items(self, items: Sequence[tuple[ReadItem, ItemPlace]], planner: LoadPlanner) -> None:
        """Copy items of one shard; raises LostError where no copy of it is intact."""

        def take(memory: Bytes) -> list[Callable[[], None]]:
            return [
                _take(memory[place.offset : place.offset + place.num_bytes], place, item, planner)
                for item, place in items
            ]

        places = [place for _, place in items]
        for commit in self._read(places[0].shard, take, places):
            commit()

    def _read(
        self, shard: str, take: Callable[[Bytes], T], wanted: Sequence[ItemPlace] | None = None
    ) -> T:
        """Return what `take` made of the bytes of a copy whose wanted pieces are intact.

        They are hashed after that: should the daemon be started again meanwhile, it may have
        used the memory for something else.
        """
        assert self._step is not None
        for _ in range(COPIES_MAX):
            try:
                loan = self._client.read(
                    step=self._step,
                    generation=self._generation,
                    shard=shard,
                    timeout_s=self._timeout_s,
                )
            except KeyError as error:
                raise LostError(f"no copy of {shard} of step {self._step} is left") from error
            except TierError as error:
                raise LostError(f"no copy of {shard} of step {self._step}: {error}") from error
            with loan:
                taken = take(np.frombuffer(loan.memory, dtype=np.uint8))
                if _is_intact(loan, wanted):
                    return taken
                with suppress(LostError):  # the next one will find it out by itself
                    loan.bad()
        raise LostError(f"no copy of {shard} of step {self._step} is intact")


def _resolve(item: WriteItem, planner: SavePlanner) -> Tensor:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        return torch.frombuffer(bytearray(cast(io.BytesIO, data).getbuffer()), dtype=torch.uint8)
    return cast(Tensor, data).detach()


def _is_intact(loan: Loan, wanted: Iterable[ItemPlace] | None) -> bool:
    """Hash the pieces in which wanted items lie, or all."""
    pieces = set(range(num_pieces(loan.meta.num_bytes)))
    if wanted is not None:
        bounds = [(each.offset, each.offset + each.num_bytes) for each in wanted]
        pieces = {piece for begin, end in bounds for piece in pieces_of(begin, end)}
    return all(is_intact(loan.memory, loan.meta, piece) for piece in sorted(pieces))


def _take(
    part: Bytes, place: ItemPlace, item: ReadItem, planner: LoadPlanner
) -> Callable[[], None]:
    """Copy an item, or the part of it that is wanted, to where the planner wants it.

    Returns what tells the planner: for bytes that are what they were, it may interpret them.
    """
    if item.type is LoadItemType.BYTE_IO:
        copied = io.BytesIO(part.tobytes())
        return lambda: planner.load_bytes(item, copied)
    target = planner.resolve_tensor(item)
    plain = target.detach()
    dtype = getattr(torch, place.dtype)
    is_whole = tuple(item.lengths) == place.shape and not any(item.storage_offsets)
    if is_whole and _is_plain(plain, dtype):
        flat_bytes(plain).numpy()[:] = part
    else:
        whole = torch.empty(math.prod(place.shape), dtype=dtype)
        if whole.numel():
            flat_bytes(whole).numpy()[:] = part
        wanted = whole.view(place.shape)
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            wanted = wanted.narrow(dim, begin, length)
        plain.copy_(wanted)
    return lambda: planner.commit_tensor(item, target)


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and tensor.numel() > 0
    )

"""Reads what AWS's library has saved, on any number of ranks.

Their own reader finds nothing in memory once the number of ranks has changed, and takes
all shards from one tier or none. This one needs nothing of theirs installed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from resilience.tiered.aws_door import CheckpointSource
from resilience.tiered.aws_format import (
    METADATA_BYTES_MAX,
    StorageInfo,
    decode_metadata,
    decode_tensor,
)
from resilience.tiered.dcp.plain_items import check_plain
from resilience.tiered.dcp.step_reader import StepReader
from resilience.tiered.errors import FormatError, LostError, TieredError

T = TypeVar("T")


class AwsReader(StepReader[StorageInfo]):
    """A StorageReader of one step, the newest by default: `dcp.load(state, storage_reader=...)`.

    Sources are asked in their order, for each shard anew. Ranks of several nodes may see
    different newest steps for a moment: give them one. Raises LostError where no source has
    a step or shard intact, and FormatError for a metadata that is none, a pickle bomb among
    them.

    What is no tensor is stored as bytes that DCP's own planner unpickles: they are looked
    through first, and what is more than plain data is refused. `allow_pickle` hands them
    over as they are: for checkpoints that only trusted people can have written.

    A tensor or item of the step that no rank's state dict has is a FormatError too;
    `allow_partial` leaves it out.
    """

    def __init__(
        self,
        sources: Sequence[CheckpointSource],
        *,
        step: int | None = None,
        allow_pickle: bool = False,
        allow_partial: bool = False,
        metadata_bytes_max: int = METADATA_BYTES_MAX,
    ) -> None:
        super().__init__(allow_partial=allow_partial)
        self._sources = tuple(sources)
        self._step = step
        self._allow_pickle = allow_pickle
        self._metadata_bytes_max = metadata_bytes_max

    @property
    def step(self) -> int | None:
        """Return the step that was asked for, or found by `read_metadata`."""
        return self._step

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the step's metadata, from the first source that has it."""
        step = self._step = self._newest_step() if self._step is None else self._step
        bytes_max = self._metadata_bytes_max
        blob = self._first(
            lambda source: source.read_metadata(step, bytes_max), f"the metadata of step {step}"
        )
        return decode_metadata(blob, bytes_max=bytes_max)

    def shard_of(self, place: StorageInfo) -> int:
        """Return the rank that has saved the shard."""
        return place.rank

    def read_items(
        self, items: Sequence[tuple[ReadItem, StorageInfo]], planner: LoadPlanner
    ) -> None:
        """Copy items of one rank's shard, from the first source that has it intact."""
        step, rank = self._step, items[0][1].rank
        assert step is not None
        begin = min(place.offset for _, place in items)
        end = max(place.offset + place.length for _, place in items)

        def take(source: CheckpointSource) -> bool | None:
            memory = source.read(step, rank, begin, end)
            if memory is None:
                return None
            for item, place in items:
                at = place.offset - begin
                content = bytes(memory[at : at + place.length])
                self._give(content, item, planner, checks=not source.is_checked)
            return True

        self._first(take, f"what rank {rank} saved of step {step}")

    def _newest_step(self) -> int:
        """Return the newest step of all sources that answer."""
        found: set[int] = set()
        errors: list[str] = []
        for source in self._sources:
            try:
                found.update(source.steps())
            except TieredError as error:
                errors.append(str(error))
        if not found:
            why = errors or [f"{each.name}: none" for each in self._sources]
            raise LostError(f"there is no step to load: {'; '.join(why)}")
        return max(found)

    def _give(self, content: bytes, item: ReadItem, planner: LoadPlanner, *, checks: bool) -> None:
        """Bring an item, or the part of it that is wanted, where the planner wants it."""
        if item.type is LoadItemType.BYTE_IO:
            if not self._allow_pickle:
                check_plain(content, checks=checks)
            planner.load_bytes(item, io.BytesIO(content))
            return
        wanted = _cut(decode_tensor(content, checks=checks), item)
        target = planner.resolve_tensor(item)
        target.detach().copy_(wanted)
        planner.commit_tensor(item, target)

    def _first(self, ask: Callable[[CheckpointSource], T | None], what: str) -> T:
        """Return the first answer of a source; what went wrong before is forgotten then."""
        errors: list[str] = []
        for source in self._sources:
            try:
                if (found := ask(source)) is not None:
                    return found
                errors.append(f"{source.name}: not there")
            except TieredError as error:
                errors.append(str(error))
        raise LostError(f"{what} cannot be had: {'; '.join(errors)}")


def _cut(tensor: Tensor, item: ReadItem) -> Tensor:
    """Return the part of a stored tensor that an item asks for."""
    if tensor.dim() != len(item.lengths):
        raise FormatError(f"{item.storage_index.fqn} has {tensor.dim()} dims where it is stored")
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if begin + length > tensor.size(dim):
            raise FormatError(
                f"{item.storage_index.fqn} has the shape {tuple(tensor.shape)} where it is stored"
            )
        tensor = tensor.narrow(dim, begin, length)
    return tensor

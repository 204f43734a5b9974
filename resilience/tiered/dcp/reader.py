"""Reads a step for torch.distributed.checkpoint: `dcp.load`."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from resilience.comm.json_objects import gather_json
from resilience.state.digest import flat_bytes
from resilience.tiered.attempts import find_attempt
from resilience.tiered.client import TieredClient
from resilience.tiered.dcp.checkpoint_id import (
    name_checkpoint,
    parse_checkpoint_id,
    split_checkpoint_id,
)
from resilience.tiered.dcp.metadata import METADATA, ItemPlace, decode_metadata
from resilience.tiered.dcp.plain_items import check_plain
from resilience.tiered.dcp.step_reader import StepReader
from resilience.tiered.errors import FormatError, LostError, TierError
from resilience.tiered.frames import describe_error, raise_error
from resilience.tiered.lending import Loan
from resilience.tiered.loader import COPIES_MAX, READ_TIMEOUT_S, newest_whole
from resilience.tiered.shard import is_intact, num_pieces, pieces_of

HEARD_TIMEOUT_S = 30.0
"""How long a rank waits for what rank 0 knows of, and its own node does not yet."""

_HEARD_PAUSE_S = 0.2

Bytes = NDArray[np.uint8]
T = TypeVar("T")


class TieredReader(StepReader[ItemPlace]):
    """Reads one step, the newest whole one by default, whoever saved it and with how many ranks.

    `checkpoint_id` names a step as TieredWriter has it. Where none is named, rank 0 of the
    process group decides and tells the others, so all ranks load together: give the reader the
    `process_group`, or `no_dist=True`, that `dcp.load` gets. A rank whose node has not heard of
    that step yet waits for it.

    Items that are no tensors are pickles, which DCP's own planner unpickles. They are looked
    through first, and what is more than plain data is refused with FormatError: `allow_pickle`
    hands them over as they are, for checkpoints that only trusted people can have written.

    A tensor or item of the step that no rank's state dict has is a FormatError too;
    `allow_partial` leaves it out.
    """

    def __init__(
        self,
        client: TieredClient,
        *,
        step: int | None = None,
        generation: int | None = None,
        allow_pickle: bool = False,
        allow_partial: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        super().__init__(allow_partial=allow_partial)
        self._client = client
        self._step = step
        self._wanted = generation
        self._generation = generation
        self._allow_pickle = allow_pickle
        self._group = process_group
        self._no_dist = no_dist
        self._heard_by_s = 0.0
        """Until then a shard that this node has not heard of is waited for."""
        self.load_id = str(uuid4())
        """Of one load alone; in the metadata that it has read."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another step where it is named."""
        super().reset()
        if checkpoint_id is not None:
            self._step = parse_checkpoint_id(checkpoint_id, self._client.namespace)
        self._generation = self._wanted
        self.load_id = str(uuid4())

    @property
    def checkpoint_id(self) -> str | None:
        """Return which step is read; None where it is not decided yet."""
        return name_checkpoint(self._client.namespace, self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it names a step."""
        return split_checkpoint_id(checkpoint_id) is not None

    def read_metadata(self) -> Metadata:
        """Return the step's metadata; raises LostError where there is no whole step."""
        if self._step is None:
            self._step, self._generation = self._agree()
        elif self._generation is None:
            self._generation = self._find_generation(self._step)
        metadata = decode_metadata(self._read(METADATA, lambda memory: memory.tobytes()))
        assert metadata.storage_meta is not None
        storage_meta = dataclasses.replace(metadata.storage_meta, load_id=self.load_id)
        return dataclasses.replace(metadata, storage_meta=storage_meta)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add which history of the step this rank reads."""
        return dataclasses.replace(plan, storage_data=(self._step, self._generation))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same, and together all of it; LostError or FormatError."""
        found = sorted({each.storage_data for each in plans})
        if len(found) > 1:
            listed = " and ".join(f"step {step} of generation {number}" for step, number in found)
            raise LostError(f"ranks would load different states, {listed}; load again")
        return super().prepare_global_plan(plans)

    def shard_of(self, place: ItemPlace) -> str:
        """Return the shard's name."""
        return place.shard

    def read_items(self, items: Sequence[tuple[ReadItem, ItemPlace]], planner: LoadPlanner) -> None:
        """Copy items of one shard; raises LostError where no copy of it is intact.

        The planner is told only of bytes that are what they were: it may interpret them.
        """

        def take(memory: Bytes) -> list[Callable[[], None]]:
            commits: list[Callable[[], None]] = []
            for item, place in items:
                part = memory[place.offset : place.offset + place.num_bytes]
                if item.type is LoadItemType.BYTE_IO:
                    commits.append(partial(self._load_pickle, part.tobytes(), item, planner))
                else:
                    commits.append(_take(part, place, item, planner))
            return commits

        places = [place for _, place in items]
        for commit in self._read(places[0].shard, take, places):
            commit()

    def _agree(self) -> tuple[int, int]:
        """Return the newest step and its generation, as rank 0 has found them; a collective."""
        if self._no_dist or not (dist.is_available() and dist.is_initialized()):
            return self._find_newest()
        told: Mapping[str, Any] = {}
        failed: Exception | None = None
        is_first = dist.get_rank(self._group) == 0
        if is_first:
            try:
                told = dict(zip(("step", "generation"), self._find_newest(), strict=True))
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                told, failed = describe_error(error), error
        told = gather_json(told, self._group)[0]
        if failed:
            raise failed
        raise_error(told)
        if not is_first:
            self._heard_by_s = time.monotonic() + HEARD_TIMEOUT_S
        return told["step"], told["generation"]

    def _find_newest(self) -> tuple[int, int]:
        newest = newest_whole(self._client)
        if newest is None:
            raise LostError("there is no whole step to load")
        return newest.step, newest.generation

    def _find_generation(self, step: int) -> int:
        """Return the newest whole attempt of a step."""
        found = find_attempt(step, self._client.known_steps())
        if found is None:
            self._client.steps()  # lists the store anew
            found = find_attempt(step, self._client.known_steps())
        if found is None:
            raise LostError(f"step {step} is not there, or not whole")
        return found

    def _load_pickle(self, content: bytes, item: ReadItem, planner: LoadPlanner) -> None:
        """Let the planner unpickle an item, if that runs nothing or may run anything."""
        if not self._allow_pickle:
            try:
                check_plain(content)
            except FormatError as error:
                raise FormatError(
                    f"{item.storage_index.fqn} of step {self._step} is a pickle that may run "
                    f"anything, {error}; allow_pickle=True loads it all the same"
                ) from error
        planner.load_bytes(item, io.BytesIO(content))

    def _read(
        self, shard: str, take: Callable[[Bytes], T], wanted: Sequence[ItemPlace] | None = None
    ) -> T:
        """Return what `take` made of the bytes of a copy whose wanted pieces are intact.

        They are hashed after that: should the daemon be started again meanwhile, it may have
        used the memory for something else.
        """
        for _ in range(COPIES_MAX):
            with self._borrow(shard) as loan:
                taken = take(np.frombuffer(loan.memory, dtype=np.uint8))
                if _is_intact(loan, wanted):
                    return taken
                with suppress(LostError):  # the next one will find it out by itself
                    loan.bad()
        raise LostError(f"no copy of {shard} of step {self._step} is intact")

    def _borrow(self, shard: str) -> Loan:
        """Return a shard; waits for one that rank 0 knows and this node has not heard of."""
        assert self._step is not None
        assert self._generation is not None
        while True:
            try:
                return self._client.read(
                    step=self._step,
                    generation=self._generation,
                    shard=shard,
                    timeout_s=READ_TIMEOUT_S,
                )
            except KeyError as error:
                if time.monotonic() >= self._heard_by_s:
                    raise LostError(f"no copy of {shard} of step {self._step} is left") from error
            except TierError as error:
                raise LostError(f"no copy of {shard} of step {self._step}: {error}") from error
            time.sleep(_HEARD_PAUSE_S)


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
    """Copy a tensor, or the part of it that is wanted; returns what tells the planner."""
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

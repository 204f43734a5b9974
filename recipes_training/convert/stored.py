"""Reads a run's newest weights from its store, whatever ranks have saved them.

One tensor after the other is put together from the shards that hold parts of it, of which only the
pieces that are needed are read.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from launcher.job import TrainingJob, read_training_job
from launcher.job.lineage import checkpoints_namespace
from launcher.job.parameters import shapes
from launcher.job.workload import GptOssModel, MegatronTrainer, Model
from recipes_training.convert.output import Output
from recipes_training.errors import CheckpointError, ConversionError
from recipes_training.megatron.names import Piece, Place, pieces
from recipes_training.weights.export import make_config
from recipes_training.weights.tensors import count_values, find_gap
from resilience.settings import StoreTier
from resilience.tiered.catalog import StepAt, find_stale
from resilience.tiered.client import StepOnOffer
from resilience.tiered.errors import TierError
from resilience.tiered.resharding import box_of
from resilience.tiered.shard import (
    PIECE_BYTES,
    ShardId,
    ShardMeta,
    TensorPlace,
    content_digest,
    pieces_of,
)
from resilience.tiered.stores.choice import open_as
from resilience.tiered.stores.reader import StoreReader
from resilience.tiered.stores.store import Store
from resilience.validation import list_some

_PIECES_KEPT = 8
Sources = dict[str, list[tuple[str, Piece]]]
"""By name of Hugging Face's tensor: what is stored, and which part of it that is."""
_OF_MEGATRON = re.compile(r"pp(\d+)-(tp|ep)(\d+)/(.+)/parameter")


def plan_stored(run_dir: Path, dtype: torch.dtype | None, step: int | None) -> Output:
    """Return the model of a run's step, the newest without one; `dtype` is the run's by default.

    Raises ConversionError where the run has no such step to read, and CheckpointError where the
    store fails or what it has is damaged.
    """
    job = read_training_job(run_dir / "job.json")
    tier = _find_store(job, run_dir)
    assert tier.url is not None
    place = run_dir.resolve() / tier.url.removeprefix("folder:")
    url = f"folder:{place}" if tier.is_in_run else tier.url
    try:
        store = open_as(url, tier)
        stored = StoredStep(store, checkpoints_namespace(job, run_dir), url, step)
    except TierError as error:
        raise CheckpointError(f"cannot read {url}: {error}") from error
    known = shapes(job.model)
    sources = _find_sources(job, stored)
    parts = {name: [piece.index for _, piece in found] for name, found in sources.items()}
    if gap := find_gap(parts, known):
        raise CheckpointError(f"{stored.title} has {gap}")
    _check_sources(sources, known, stored)
    if dtype is None:
        is_bf16 = job.trainer.kind == "megatron" and job.trainer.precision == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32

    def gather(name: str) -> Tensor:
        whole = torch.empty(known[name], dtype=dtype)
        try:
            for tensor, piece in sources[name]:
                _copy(stored.read(tensor), piece, whole)
        except TierError as error:
            raise CheckpointError(f"cannot read {url}: {error}") from error
        return whole

    return Output(shapes=known, dtype=dtype, gather=gather, config=make_config(job.model))


def _find_store(job: TrainingJob, run_dir: Path) -> StoreTier:
    tiered = job.resilience.tiered
    if tiered is None or tiered.store is None or tiered.store.url is None:
        raise ConversionError(
            f"the run in {run_dir} keeps no checkpoints in a store (resilience.tiered.store)"
        )
    if tiered.backend != "memoryd":
        raise ConversionError(
            f"the run in {run_dir} has resilience.tiered.backend {tiered.backend!r}; allowed: "
            "'memoryd'"
        )
    return tiered.store


def _find_sources(job: TrainingJob, stored: StoredStep) -> Sources:
    """Return what of the checkpoint makes up each of Hugging Face's tensors."""
    sources: Sources = {}
    for name in stored.names:
        if not isinstance(job.trainer, MegatronTrainer):
            kind, _, source = name.partition("/")
            if kind == "parameter":
                sources[source] = [(name, Piece(source=source, index=()))]
        elif (found := _parse_name(name, job.model, job.trainer)) is not None:
            try:
                made_of = pieces(found[0], job.model, found[1])
            except KeyError:
                made_of = (Piece(source=found[0], index=()),)
            for piece in made_of:
                sources.setdefault(piece.source, []).append((name, piece))
    return sources


def _check_sources(
    sources: Sources, known: Mapping[str, tuple[int, ...]], stored: StoredStep
) -> None:
    """Refuse a step of another model: it has other tensors, or some of another shape."""
    if others := sorted(sources.keys() - known.keys()):
        listed = list_some(others)
        raise CheckpointError(f"{stored.title} has {listed}, which the run's model does not have")
    sizes: Counter[str] = Counter()
    whole: dict[str, tuple[int, ...]] = {}
    for source, found in sources.items():
        for name, piece in found:
            sizes[name] += count_values(piece.index, known[source])
            if not piece.index:
                whole[name] = known[source]
    for name, size in sizes.items():
        if (shape := stored.shape(name)) not in ((size,), whole.get(name)):
            raise CheckpointError(
                f"{stored.title} has {name} as {list(shape)}, the run's model as "
                f"{list(whole.get(name, (size,)))}"
            )


def _parse_name(name: str, model: Model, trainer: MegatronTrainer) -> tuple[str, Place] | None:
    """Return parameter and place of what `MegatronState` has named; None for moments."""
    found = _OF_MEGATRON.fullmatch(name)
    if found is None:
        return None
    stage, kind, number, parameter = int(found[1]), found[2], int(found[3]), found[4]
    experts = model.num_experts if isinstance(model, GptOssModel) else 0
    is_tensor = kind == "tp"
    return parameter, Place(
        tensor_rank=number if is_tensor else 0,
        tensor_size=trainer.tensor_parallel,
        first_layer=model.num_layers // trainer.pipeline_parallel * stage,
        first_expert=0 if is_tensor else experts // trainer.expert_parallel * number,
    )


def _copy(tensor: Tensor, piece: Piece, whole: Tensor) -> None:
    """Bring the rows of a parameter, which may be flat, to where they stand."""
    target = whole[piece.index]
    if piece.is_transposed:
        target = target.T
    target.copy_(tensor.view(-1, *target.shape[1:])[piece.rows].reshape(target.shape))


@dataclass(frozen=True, slots=True)
class _Part:
    meta: ShardMeta
    place: TensorPlace


class StoredStep:
    """The tensors of one whole step of a namespace, by name. Calls raise TierError."""

    def __init__(self, store: Store, namespace: str, url: str, step: int | None) -> None:
        """Take the newest step, or the one that is asked for."""
        self._store, self._namespace = store, namespace
        offer = _choose(store, namespace, url, step)
        self.title = f"step {offer.step} of {namespace!r} in {url}"
        self._parts: dict[str, list[_Part]] = {}
        for shard in offer.shards:
            name = ShardId(
                namespace=namespace, step=offer.step, generation=offer.generation, shard=shard
            )
            if (meta := store.get_meta(name)) is None:
                raise TierError(f"shard {shard} of step {offer.step} has gone meanwhile")
            for place in meta.tensors:
                self._parts.setdefault(place.name, []).append(_Part(meta, place))
        # Tensors follow each other within a piece.
        self._read_piece: Callable[[str, int, int, int], bytearray]
        self._read_piece = lru_cache(maxsize=_PIECES_KEPT)(self._fetch_piece)

    @property
    def names(self) -> Iterator[str]:
        """Return the names of all tensors."""
        return iter(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._parts[name][0].place.full_shape

    def read(self, name: str) -> Tensor:
        """Return a whole tensor; what is not as its checksums say is a TierError."""
        parts = self._parts[name]
        first = parts[0].place
        whole = torch.empty(first.full_shape, dtype=getattr(torch, first.dtype))
        num_values = 0
        for each in parts:
            if not each.place.num_bytes:
                continue
            values = torch.frombuffer(self._read(each), dtype=whole.dtype)
            own = box_of(each.place).within((0,) * whole.ndim)
            whole[own] = values.view(each.place.shape)
            num_values += values.numel()
        if num_values < math.prod(first.full_shape):
            raise TierError(f"{self.title} has not all of {name}")
        return whole

    def _read(self, part: _Part) -> bytearray:
        begin, end = part.place.offset, part.place.offset + part.place.num_bytes
        found = bytearray()
        digest = content_digest(part.meta)
        for number in pieces_of(begin, end):
            origin = number * PIECE_BYTES
            piece = self._read_piece(
                digest, part.meta.num_bytes, number, part.meta.checksums[number]
            )
            found += memoryview(piece)[max(0, begin - origin) : end - origin]
        return found

    def _fetch_piece(self, digest: str, num_bytes: int, number: int, checksum: int) -> bytearray:
        begin = number * PIECE_BYTES
        piece = bytearray(min(PIECE_BYTES, num_bytes - begin))
        self._store.get_data(self._namespace, digest, num_bytes, memoryview(piece), begin=begin)
        if xxhash.xxh3_64_intdigest(piece) != checksum:
            raise TierError(
                f"{self.title} is damaged: its bytes are not what their checksums say; choose "
                "another step with --step"
            )
        return piece


def _choose(store: Store, namespace: str, url: str, step: int | None) -> StepOnOffer:
    """Return the newest whole step, or the one that is asked for."""
    reader = StoreReader(store, namespace, source=url)
    offers = {
        StepAt(step=each.step, generation=each.generation): each
        for each in reader.steps(reads_all=True)
    }
    stale = find_stale(offers)
    whole = [
        each
        for at, each in offers.items()
        if at not in stale and len(each.shards) == each.num_shards
    ]
    damaged = {number: reason for (number, _), reason in reader.left_out.items()}
    if step in damaged and all(each.step != step for each in whole):
        raise CheckpointError(f"step {step} of {namespace!r} in {url} is damaged: {damaged[step]}")
    if not whole:
        raise CheckpointError(f"the namespace {namespace!r} in {url} has no whole step")
    found = next((each for each in whole if step in (None, each.step)), None)
    if found is None:
        steps = ", ".join(str(each.step) for each in whole)
        raise ConversionError(
            f"the namespace {namespace!r} in {url} has no step {step}, but {steps}"
        )
    for number in sorted(each for each in damaged if step is None and each > found.step):
        sys.stderr.write(
            f"recipes_training.convert: step {number} is damaged, and step {found.step} is the "
            f"newest that is whole: {damaged[number]}\n"
        )
    return found

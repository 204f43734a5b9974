"""Hugging Face's weights, into this rank's part of Megatron's model and out of it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from launcher.job import TrainingJob
from launcher.job.parameters import shapes
from recipes_training.errors import CheckpointError
from recipes_training.group import WorkerGroup
from recipes_training.megatron.model import MegatronModel, is_expert
from recipes_training.megatron.names import Piece, Place, blocks, pieces
from recipes_training.weights.draw import draw_part
from recipes_training.weights.export import make_config, write_model
from recipes_training.weights.folder import open_weights
from recipes_training.weights.tensors import Index, Part, find_gap
from resilience.comm.json_objects import gather_json

_Read = Callable[[str, Part], Tensor]


def fill_model(job: TrainingJob, model: MegatronModel) -> None:
    """Set parameters to what they are before the first step, and moments to zero."""
    read = _make_reader(job)
    with torch.no_grad():
        for name, parameter in model.core.named_parameters():
            for source, part, own in blocks(name, job.model, model.place):
                _fill(parameter.data, read(source, part), own)
        for each in model.parts:
            each._copy_model_params_to_main_params()  # noqa: SLF001
            for moments in each.optimizer.state.values():
                for tensor in moments.values():
                    tensor.zero_()


def _fill(parameter: Tensor, block: Tensor, own: list[tuple[Piece, Index]]) -> None:
    for piece, within in own:
        rows, values = parameter[piece.rows], block[within]
        rows.copy_((values.T if piece.is_transposed else values).reshape(rows.shape))


def _make_reader(job: TrainingJob) -> _Read:
    known, seed, std = shapes(job.model), job.trainer.seed, job.model.init_std
    if not job.model.weights:
        return lambda name, part: draw_part(name, known[name], part, seed=seed, std=std)
    weights = open_weights(Path(job.model.weights), job.model)
    return lambda name, part: weights.read(name, known[name], part)


def export_model(
    job: TrainingJob, model: MegatronModel, folder: Path, *, group: WorkerGroup
) -> None:
    """Write the model in Hugging Face's layout; every rank calls it.

    Raises CheckpointError on every rank where their parts do not make up a tensor, before anything
    is written. Rank 0 is sent one tensor after the other by the ranks that hold its parts.
    """
    parameters = dict(model.core.named_parameters())
    told = gather_json([asdict(model.place), [*filter(_is_writer(model), parameters)]])
    parts: dict[str, list[tuple[int, str, Piece]]] = {}
    for rank, (place, names) in enumerate(told):
        for name in names:
            for piece in pieces(name, job.model, Place(**place)):
                parts.setdefault(piece.source, []).append((rank, name, piece))
    known = shapes(job.model)
    indices = {source: [piece.index for *_, piece in found] for source, found in parts.items()}
    if gap := find_gap(indices, known):
        raise CheckpointError(f"cannot write the checkpoint {folder}: the ranks have {gap}")
    dtype = next(iter(parameters.values())).dtype

    def gather(source: str) -> Tensor:
        whole = torch.empty(known[source] if group.rank == 0 else (0,), dtype=dtype)
        for rank, name, piece in parts[source]:
            if rank == group.rank:
                rows = parameters[name].data[piece.rows]
                values = (rows.T if piece.is_transposed else rows).contiguous()
            if group.rank == 0:
                target = whole[piece.index]
                if rank != 0:
                    values = torch.empty(target.shape, dtype=dtype, device=group.device)
                    dist.recv(values, src=rank)
                target.copy_(values.view(target.shape))
            elif rank == group.rank:
                dist.send(values, dst=0)
        return whole

    sizes = {name: dtype.itemsize * int(np.prod(known[name])) for name in known}
    write_model(folder, sizes=sizes, gather=gather, config=make_config(job.model), group=group)


def _is_writer(model: MegatronModel) -> Callable[[str], bool]:
    """Return which parameters this rank is the first to hold."""
    is_first = parallel_state.get_data_parallel_rank() == 0
    is_first_expert = parallel_state.get_expert_data_parallel_rank() == 0
    parameters = dict(model.core.named_parameters())
    return lambda name: is_first_expert if is_expert(parameters[name]) else is_first

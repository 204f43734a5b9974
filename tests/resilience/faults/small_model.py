"""A transformer-like model with hooks for faults, and what ranks do with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resilience.faults.hooks import reach_in_backward
from resilience.faults.injector import InjectedFault, Injector
from resilience.settings import Fault
from resilience.state.layout import make_layout


class Layer(nn.Module):
    """Returns a tuple, as layers of transformers may, and computes its activations again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, value: Tensor) -> tuple[Tensor, None]:
        return checkpoint(self._compute, value, use_reentrant=False), None

    def _compute(self, value: Tensor) -> Tensor:
        return value + self.attention(*[self.norm(value)] * 3, need_weights=False)[0]


class SmallModel(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        for layer in self.layers:
            value, _ = layer(value)
        return self.head(value)

    def run_loss(self, run: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return (run or self)(torch.arange(12).view(2, 6)).square().mean()

    def hook(self, injector: Injector, **options: Any) -> tuple[Any, ...]:
        return reach_in_backward(
            list(self.layers),
            places=injector.places,
            reach=lambda place: injector.reach(place, 0),
            **options,
        )

    def finished_layers(self) -> list[int]:
        return [
            number
            for number, layer in enumerate(self.layers)
            if all(each.grad is not None for each in layer.parameters())
        ]


def make_injector(
    folder: Path | str,
    places: list[Any],
    *,
    kind: Any = "corrupt",
    rank: int = 0,
    on_corrupt: Callable[[str], None] = print,
) -> Injector:
    """Return an injector with a fault of rank 0 in each place; a corrupt one only tells."""
    tensors: list[Any] = ["parameter", "moment"]
    faults = [
        Fault(kind=kind, place=place, step=0, rank=0, tensor=tensor if kind == "corrupt" else None)
        for place, tensor in zip(places, tensors, strict=False)
    ]
    layout = make_layout(nodes=("n0",), num_local_ranks=2)
    return Injector(faults, rank=rank, layout=layout, run_dir=Path(folder), on_corrupt=on_corrupt)


def _log_to(log: list[Any], model: SmallModel) -> Callable[[str], None]:
    names = {"parameter": "backward", "moment": "reduction"}
    return lambda tensor: log.append((names[tensor], model.finished_layers()))


def reach_alone(folder: Path, num_layers: int) -> list[Any]:
    log: list[Any] = []
    model = SmallModel(num_layers)
    model.hook(make_injector(folder, ["backward", "reduction"], on_corrupt=_log_to(log, model)))
    for _ in range(2):
        model.run_loss().backward()
    return log


def _open_group(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _replicate(model: SmallModel) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)


def reach_over_ddp(rank: int, world_size: int, folder: str) -> list[Any]:
    """Return in which order places were reached and buckets handed over, in a second step."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    _open_group(rank, world_size, folder)
    log: list[Any] = []
    model = SmallModel(4)
    run = _replicate(model)

    def hand_over(group, bucket):  # type: ignore[no-untyped-def]
        log.append("bucket")
        return allreduce_hook(group, bucket)

    run.register_comm_hook(None, hand_over)
    model.run_loss(run).backward()
    log.clear()
    injector = make_injector(
        folder,
        ["backward", "reduction"],
        rank=rank,
        on_corrupt=lambda tensor: log.append("backward" if tensor == "parameter" else "reduction"),
    )
    model.hook(injector)
    model.run_loss(run).backward()
    return log


def raise_over_ddp(rank: int, world_size: int, folder: str) -> str:
    _open_group(rank, world_size, folder)
    model = SmallModel(4)
    run = _replicate(model)
    model.hook(make_injector(folder, ["reduction"], kind="exception", rank=rank))
    try:
        model.run_loss(run).backward()
    except InjectedFault as fault:
        return str(fault)
    except RuntimeError:
        return "peer"
    return "ended"


def reach_over_fsdp(rank: int, world_size: int, folder: str) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _open_group(rank, world_size, folder)
    mesh = init_device_mesh("cpu", (world_size,))
    log: list[Any] = []
    model = SmallModel(4)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.hook(
        make_injector(folder, ["backward", "reduction"], rank=rank, on_corrupt=_log_to(log, model))
    )
    model.run_loss().backward()
    return log

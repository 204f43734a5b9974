"""torch's own checkpoints over the daemon: other numbers of ranks, broken copies, no pickle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from resilience.tiered.client import TieredClient
from resilience.tiered.dcp import TieredReader, TieredWriter
from resilience.tiered.dcp.metadata import ItemPlace, decode_metadata, encode_metadata
from resilience.tiered.errors import LostError, TieredError
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.daemons import Daemon, segments

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DIM = 10


def connect(path: str) -> TieredClient:
    return TieredClient(Path(path), namespace="run", job="job")


def open_world(rank: int, world_size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def make_whole(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(13, 5, generator=draw),
        "half": torch.randn(7, 3, generator=draw).bfloat16(),
        "whole": torch.randn(4, generator=draw),
        "scalar": torch.randn((), generator=draw),
    }


def spread(whole: dict[str, Tensor], world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        "tensors": {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "half": distribute_tensor(whole["half"], mesh, [Shard(1)]),
            "whole": distribute_tensor(whole["whole"], mesh, [Replicate()]),
            "scalar": whole["scalar"].clone(),
        },
        "list": [{"step": 3, "name": "text"}, 2.5],
        "empty": torch.empty(0),
    }


def make_training(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, 3))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for _ in range(number):
        # The same batch everywhere, so that the mean over any number of ranks is equal.
        model(torch.randn(6, DIM, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    rows: list[Any] = []
    for each in model.parameters():
        kept = optimizer.state[each]
        parts = (each, kept["exp_avg"], kept["exp_avg_sq"])
        rows += [part.full_tensor().detach().tolist() for part in parts]  # type: ignore[attr-defined]
        rows.append(float(kept["step"]))
    return rows


def save_spread(rank: int, world_size: int, folder: str, path: str) -> list[Any]:
    """Save tensors of all kinds and a sharded training state."""
    open_world(rank, world_size, folder)
    model, optimizer = make_training(world_size)
    take_steps(model, optimizer, 3)
    weights, moments = get_state_dict(model, optimizer)
    state = {**spread(make_whole(1), world_size), "m": weights, "o": moments}
    with connect(path) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = TieredWriter(client, step=7, generation=2)
        dcp.async_save(state, storage_writer=writer).result()
    return full(model, optimizer)


def load_spread(rank: int, world_size: int, folder: str, path: str) -> tuple[dict[str, Any], Any]:
    open_world(rank, world_size, folder)
    model, optimizer = make_training(world_size)
    weights, moments = get_state_dict(model, optimizer)
    state = {**spread(make_whole(2), world_size), "m": weights, "o": moments}
    state["list"] = [{"step": 0, "name": ""}, 0.0]
    with connect(path) as client:
        dcp.load(state, storage_reader=TieredReader(client))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    found = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in state["tensors"].items()
    }
    tensors = {name: each.tolist() for name, each in found.items()}
    return {**tensors, "list": state["list"]}, full(model, optimizer)


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4, 8))]
)
def test_what_four_ranks_saved_comes_back_on_any_number(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    (trained, *_) = run_ranks(save_spread, 4, str(tmp_path), str(daemon.socket_path))
    (tmp_path / "load").mkdir()

    found = run_ranks(load_spread, world_size, str(tmp_path / "load"), str(daemon.socket_path))

    expected: dict[str, Any] = {name: each.tolist() for name, each in make_whole(1).items()}
    expected["list"] = [{"step": 3, "name": "text"}, 2.5]
    assert found == [(expected, trained)] * world_size


def save_alone(client: TieredClient, value: float, step: int) -> None:
    state = {"a": torch.full((3 << 20,), value), "b": torch.arange(4)}
    dcp.save(state, storage_writer=TieredWriter(client, step=step), no_dist=True)


def load_alone(client: TieredClient) -> dict[str, Tensor]:
    state = {"a": torch.zeros(3 << 20), "b": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, storage_reader=TieredReader(client), no_dist=True)
    return state


def test_step_without_its_metadata_is_not_whole(daemon: Daemon) -> None:
    client = daemon.client()
    writer = TieredWriter(client, step=1)
    writer.finish = lambda metadata, results: None  # type: ignore[method-assign]
    dcp.save({"a": torch.ones(4)}, storage_writer=writer, no_dist=True)

    with pytest.raises(dcp.api.CheckpointException, match="there is no whole step to load"):
        load_alone(client)


def test_changed_copy_is_not_loaded(daemon: Daemon) -> None:
    client = daemon.client()
    save_alone(client, 1.0, 1)
    largest = max(segments(daemon.folder), key=lambda each: each.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"changed")

    with pytest.raises(dcp.api.CheckpointException) as caught:
        load_alone(client)

    (error,) = caught.value.failures.values()
    assert isinstance(error[0], LostError)
    assert "no copy of rank-0 of step 1 is left" in str(error[0])


class Careless(dcp.DefaultLoadPlanner):
    """While it takes the first item, its memory is used for something else."""

    segment: Path
    is_told = False

    def resolve_tensor(self, read_item: Any) -> Tensor:
        with self.segment.open("r+b") as file:
            file.write(b"else")
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self.is_told = True


def test_copy_that_changes_while_it_is_taken_is_not_loaded(daemon: Daemon) -> None:
    """So it may be with a daemon that was started again meanwhile."""
    client, planner = daemon.client(), Careless()
    save_alone(client, 1.0, 1)
    planner.segment = max(segments(daemon.folder), key=lambda each: each.stat().st_size)
    state = {"a": torch.zeros(3 << 20), "b": torch.zeros(4, dtype=torch.int64)}

    with pytest.raises(dcp.api.CheckpointException, match="no copy of rank-0 of step 1 is left"):
        dcp.load(state, storage_reader=TieredReader(client), planner=planner, no_dist=True)

    assert not planner.is_told


def test_full_memory_fails_the_save_and_leaves_the_older_step(daemon: Daemon) -> None:
    client = daemon.client()
    save_alone(client, 1.0, 1)

    state = {"a": torch.zeros(80 << 20, dtype=torch.uint8)}

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=TieredWriter(client, step=2), no_dist=True)

    (error,) = caught.value.failures.values()
    assert isinstance(error[0], TieredError)
    assert load_alone(client)["a"][0] == 1.0


def test_metadata_is_the_same_after_its_text(daemon: Daemon) -> None:
    client = daemon.client()
    save_alone(client, 1.0, 1)
    metadata = TieredReader(client).read_metadata()

    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = None  # of one load alone

    again = decode_metadata(encode_metadata(metadata, metadata.storage_data))

    assert again == metadata
    assert metadata.storage_data[MetadataIndex("b", [0])] == ItemPlace(
        shard="rank-0", offset=12 << 20, num_bytes=32, shape=(4,), dtype="int64"
    )


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"format":2}', b'{"format":1,"tensors":{"a":{"dtype":"save"}}}']
)
def test_text_that_is_no_metadata_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="no metadata of a checkpoint"):
        decode_metadata(text)


def test_planner_whose_data_would_need_a_pickle_is_refused(daemon: Daemon) -> None:
    client = daemon.client()
    save_alone(client, 1.0, 1)
    metadata = TieredReader(client).read_metadata()
    metadata.planner_data = {"a": (object(),)}

    with pytest.raises(ValueError, match=r"the path of 'a', .* would need a pickle"):
        encode_metadata(metadata, {})

"""Which models are taken, and which are refused with what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from resilience.errors import StateError
from resilience.protection.models import DdpBinding, FsdpBinding, PlainBinding, bind
from resilience.protection.state import ProtectedState


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"static_graph": True}, "static_graph"),
    ],
)
@pytest.mark.usefixtures("world")
def test_options_of_ddp_that_are_not_kept_exact(options: dict[str, Any], name: str) -> None:
    model = DistributedDataParallel(nn.Linear(2, 1), **options)

    with pytest.raises(StateError, match=f"DistributedDataParallel with {name} is not kept exact"):
        bind(model)


@pytest.mark.usefixtures("world")
def test_communication_hook_is_refused() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())

    with pytest.raises(StateError, match="with a communication hook is not kept exact"):
        bind(model)


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.usefixtures("world")
def test_statistics_that_ranks_do_not_share_are_refused() -> None:
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), broadcast_buffers=False
    )

    with pytest.raises(StateError, match="tracks running statistics"):
        bind(model)


@pytest.mark.usefixtures("world")
def test_shards_without_copies_are_refused() -> None:
    model = fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))

    with pytest.raises(StateError, match="over a mesh of 1 axes keeps each shard once; give it"):
        bind(model)


@pytest.mark.usefixtures("world")
def test_shards_of_ranks_in_another_order_are_refused(monkeypatch: Any) -> None:
    """A rank would be repaired from a rank that holds another shard."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))
    model = fully_shard(nn.Linear(2, 1), mesh=mesh)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    with pytest.raises(StateError, match="does not have all ranks of the run in their order"):
        bind(model)


def test_ranks_that_do_not_sum_their_gradients_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(StateError, match="the model is a Linear, whose ranks do not sum"):
        bind(nn.Linear(2, 1))


class Engine(nn.Linear):
    __module__ = "deepspeed.runtime.engine"


def compiled(model: nn.Linear) -> nn.Module:
    model.compile()
    return model


def paired(model: nn.Linear) -> nn.Module:
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    return model


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        pytest.param(torch.compile, "a module is compiled; a process", id="compiled"),
        pytest.param(compiled, "a module is compiled; a process", id="in-place"),
        pytest.param(paired, "parameter '0.weight' is a TwoTensor, which is", id="subclass"),
        pytest.param(lambda _: Engine(2, 1), "a DeepSpeed engine sums", id="deepspeed"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.usefixtures("world")
def test_model_that_no_binding_keeps_exact_is_refused(wrap: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        bind(nn.Sequential(wrap(nn.Linear(2, 1))))


def test_optimizer_that_communicates_is_refused() -> None:
    class Zero(torch.optim.SGD):
        __module__ = "torch.distributed.optim.zero_redundancy_optimizer"

    model = nn.Linear(2, 1)

    with pytest.raises(StateError, match="Zero communicates in its step"):
        ProtectedState(model, [Zero(model.parameters(), lr=0.1)], [])


@pytest.mark.usefixtures("world")
def test_kinds_of_models() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards"))

    assert isinstance(bind(nn.Linear(2, 1)), PlainBinding)
    assert isinstance(bind(DistributedDataParallel(nn.Linear(2, 1))), DdpBinding)
    assert isinstance(bind(fully_shard(nn.Linear(2, 1), mesh=mesh)), FsdpBinding)


@pytest.mark.usefixtures("world")
def test_gradients_under_ddp_are_those_of_torch() -> None:
    """Of one rank, whose mean is its own; with accumulation in no_sync."""
    torch.manual_seed(0)
    plain, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.module.load_state_dict(plain.state_dict())
    binding = bind(model)
    binding.take_groups()

    for each in (plain, model):
        each(inputs).sum().backward()
    with model.no_sync():
        model(inputs).sum().backward()
    plain(inputs).sum().backward()
    model(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()

    assert torch.equal(model.module.weight.grad, plain.weight.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("world")
def test_model_that_is_protected_already_is_refused() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    bind(model)

    with pytest.raises(StateError, match="the model is protected already"):
        bind(model)


@pytest.mark.usefixtures("world")
def test_buffer_that_a_forward_replaces_is_shared_as_well(monkeypatch: Any) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    binding = bind(model)
    model.module[1].running_mean = torch.full((2,), 3.0)  # type: ignore[index]
    told = list[float]()
    monkeypatch.setattr(dist, "broadcast", lambda flat, root: told.extend(flat.tolist()))

    binding.share_buffers()

    assert told.count(3.0) == 2


@pytest.mark.usefixtures("world")
def test_parameter_without_a_gradient_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.used(inputs)
            return found

    model = DistributedDataParallel(Half())
    bind(model).take_groups()

    with pytest.raises(StateError, match="2 parameters of the model got no gradient"):
        model(torch.ones(1, 2)).sum().backward()

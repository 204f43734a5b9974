from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from resilience.errors import StateError
from resilience.state.digest import digest_state
from resilience.state.torch_state import TorchState, materialise, refuse_unshared
from resilience.state.view import StateView
from tests.resilience.state.conftest import RunNode

MakeOptimizer = Callable[[nn.Module], Optimizer]
FIRST_LAYER = 0
OPTIMIZERS = [
    pytest.param(lambda model: Adam(model.parameters(), lr=0.1), id="adam"),
    pytest.param(lambda model: AdamW(model.parameters(), lr=0.1), id="adamw"),
    pytest.param(lambda model: AdamW(model.parameters(), amsgrad=True), id="amsgrad"),
    pytest.param(lambda model: AdamW(model.parameters(), foreach=False), id="one-by-one"),
    pytest.param(lambda model: AdamW(model.parameters(), fused=True), id="fused"),
    pytest.param(lambda model: Adam(model.parameters(), weight_decay=0.1), id="decay"),
]


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    model[FIRST_LAYER].to(memory_format=torch.channels_last)
    return model.to(dtype)


def take_steps(model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 4, 4, generator=draw).to(dtype)).square().sum().backward()
        optimizer.step()


def facts(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what can be told of each tensor of the optimizer."""
    return [
        {
            key: (each.dtype, each.device, each.shape, each.stride(), each.requires_grad)
            for key, each in optimizer.state[parameter].items()
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_state_made_beforehand_changes_no_bit(
    make_optimizer: MakeOptimizer, dtype: torch.dtype
) -> None:
    digests, told = [], []
    for is_made_before in (False, True):
        model = make_model(dtype)
        optimizer = make_optimizer(model)
        if is_made_before:
            materialise(optimizer)
            told.append(facts(optimizer))
        take_steps(model, optimizer, 3)
        told.append(facts(optimizer))
        digests.append(digest_state(TorchState(model, optimizer)))

    assert digests[0] == digests[1]
    assert told[0] == told[1] == told[2]


def test_moments_take_no_memory_until_they_are_written_nor_after_they_have_moved() -> None:
    """Those of a rank that is about to be repaired never are: it takes what lies in its place."""
    weight = nn.Parameter(torch.empty(4 << 10, 4 << 10))
    optimizer = AdamW([weight])

    materialise(optimizer)

    moment = optimizer.state[weight]["exp_avg"]
    begin, num_pages = moment.data_ptr(), moment.nbytes // mmap.PAGESIZE
    assert count_resident(begin, num_pages) == 0
    moment.add_(1)
    assert (moment == 1).all()
    assert count_resident(begin, num_pages) == num_pages
    moment.data = torch.ones(3)
    assert count_resident(begin, num_pages) == 0


def count_resident(address: int, num_pages: int) -> int:
    """Return how many pages from an address on have memory: bit 63 in the kernel's page map."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(num_pages * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())


def test_state_made_beforehand_counts_in_the_default_type(run_in_doubles: None) -> None:
    told = []
    for is_made_before in (False, True):
        model = make_model(torch.float64)
        optimizer = AdamW(model.parameters())
        if is_made_before:
            materialise(optimizer)
        else:
            take_steps(model, optimizer, 1)
        told.append(facts(optimizer))

    assert told[0] == told[1]
    assert told[0][0]["step"][0] == torch.float64


@pytest.fixture
def run_in_doubles() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_state_of_shards_made_beforehand_changes_no_bit(run_node: RunNode) -> None:
    outcome = run_node("sharded_first_step")

    for rank in range(2):
        lazy, made_before = outcome.word(rank)
        assert lazy == made_before
    assert outcome.word(0) != outcome.word(1)


def test_state_that_is_there_is_kept() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    take_steps(model, optimizer, 2)
    before = digest_state(TorchState(model, optimizer))

    materialise(optimizer)

    assert digest_state(TorchState(model, optimizer)) == before


def test_frozen_parameter_gets_no_moments() -> None:
    model = make_model()
    model[FIRST_LAYER].weight.requires_grad_(requires_grad=False)
    optimizer = AdamW(model.parameters())

    materialise(optimizer)

    names = [each.name for each in TorchState(model, optimizer).tensors()]
    assert "parameter/0.weight" in names
    assert [name for name in names if name.startswith("optimizer/0.weight")] == []


class OwnAdam(Adam):
    pass


@pytest.mark.parametrize("kind", [SGD, NAdam, OwnAdam])
def test_other_optimizers_are_refused_by_name(kind: type[Optimizer]) -> None:
    optimizer = kind(make_model().parameters(), lr=0.1)  # type: ignore[call-arg]

    with pytest.raises(StateError, match=f"what {kind.__name__} keeps .*; use Adam or AdamW"):
        materialise(optimizer)


def test_optimizer_that_keeps_no_tensors_is_refused() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model[FIRST_LAYER].bias]["count"] = 3

    with pytest.raises(StateError, match=r"SGD keeps 'count' of parameter '0.bias' as int"):
        TorchState(model, optimizer).tensors()


def test_tensors_have_one_order_and_share_memory() -> None:
    model = make_model()
    groups = [{"params": [model[2].weight, model[FIRST_LAYER].bias]}]
    groups.append({"params": [model[2].bias, model[FIRST_LAYER].weight]})
    optimizer = AdamW(groups)
    materialise(optimizer)
    view: StateView = TorchState(model, optimizer, replica=1, shard="2")

    tensors = {each.name: each.tensor for each in view.tensors()}

    parameters = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert list(tensors) == [
        *[f"parameter/{name}" for name in parameters],
        *[f"optimizer/{n}/{key}" for n in parameters for key in ("exp_avg", "exp_avg_sq", "step")],
    ]
    assert (view.replica, view.shard) == (1, "2")
    assert tensors["parameter/0.bias"].data_ptr() == model[FIRST_LAYER].bias.data_ptr()
    moments = optimizer.state[model[2].weight]
    assert tensors["optimizer/2.weight/exp_avg"].data_ptr() == moments["exp_avg"].data_ptr()
    assert not any(each.requires_grad for each in tensors.values())


def test_shared_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight

    names = [each.name for each in TorchState(model, AdamW(model.parameters())).tensors()]

    assert names == ["parameter/0.bias", "parameter/0.weight", "parameter/1.bias"]


def test_rest_goes_from_state_to_state_as_json() -> None:
    sender = TorchState(make_model(), AdamW(make_model().parameters(), lr=0.1, betas=(0.8, 0.9)))
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1.0)
    receiver = TorchState(model, optimizer)
    extra = receiver.extra
    extra["old"] = 1
    sender.extra["position"] = 42

    receiver.write_rest(json.loads(json.dumps(sender.read_rest())))

    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert extra == {"position": 42}
    assert receiver.read_rest() == sender.read_rest()


def test_tensor_among_the_options_is_one_of_the_tensors() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    state = TorchState(model, optimizer)

    assert state.tensors()[-1].name == "option/0/lr"
    assert "lr" not in state.read_rest()["groups"][0]


def test_rest_of_another_number_of_groups_is_refused() -> None:
    model = make_model()
    state = TorchState(model, AdamW(model.parameters(), lr=0.5))

    with pytest.raises(StateError, match="0 parameter groups arrived for an optimizer with 1"):
        state.write_rest({"groups": [], "extra": {}})


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm2d(2).eval(),
        nn.SyncBatchNorm(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_running_statistics_are_refused_with_the_modules_name(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm))

    refuse_unshared(nn.Sequential(nn.LayerNorm(2), nn.InstanceNorm1d(2), nn.GroupNorm(1, 2)))
    refuse_unshared(nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(StateError, match=rf"module '1\.0' \({type(norm).__name__}\) tracks"):
        refuse_unshared(model)


def test_gradients_are_left_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    gradient: Tensor = weight.grad

    materialise(AdamW([weight]))

    assert weight.grad is gradient

"""The state of a protected program: what is copied, what travels, what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel

from resilience.errors import StateError
from resilience.protection.state import ProtectedState, unwrap
from resilience.state.digest import digest_state


def make(*, seed: int = 0, num_steps: int = 0) -> tuple[ProtectedState, nn.Module, Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = MultiStepLR(optimizer, milestones=[1, 2])
    average = AveragedModel(model)
    state = ProtectedState(model, [optimizer], [scheduler, average])
    for _ in range(num_steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
    return state, model, optimizer, scheduler


def move(source: ProtectedState, target: ProtectedState) -> None:
    target.grow(source.describe())
    for each, other in zip(source.tensors(), target.tensors(), strict=True):
        assert (each.name, each.tensor.shape) == (other.name, other.tensor.shape)
        other.tensor.copy_(each.tensor)
    target.write_rest(json.loads(json.dumps(source.read_rest())))


def test_new_process_takes_over_a_state_that_was_made_in_training() -> None:
    source, _, _, scheduler = make(num_steps=2)
    source.cursor = {"step": 2}
    target, _, optimizer, other = make(seed=1)

    move(source, target)

    assert digest_state(target) == digest_state(source)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert other.state_dict() == scheduler.state_dict()
    assert target.cursor == {"step": 2}


def test_state_of_a_new_optimizer_is_empty_again() -> None:
    source, *_ = make()
    target, _, optimizer, _ = make(num_steps=1)
    assert optimizer.state

    move(source, target)

    assert not optimizer.state


def test_snapshot_brings_back_what_a_step_changes_before_its_gate() -> None:
    state, model, optimizer, scheduler = make(num_steps=1)
    before = [each.clone() for each in model.buffers()]
    snapshot = state.snapshot()
    rest = state.read_rest()

    model(torch.randn(5, 4))
    optimizer.param_groups[0]["lr"] = 7.0
    scheduler.step()
    state.cursor["position"] = 3
    state.restore(snapshot)

    assert all(map(torch.equal, model.buffers(), before))
    assert state.read_rest() == rest
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Wrapped:
    """A scaler in an object of its own, as libraries have it."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.state_dict, self.load_state_dict = scaler.state_dict, scaler.load_state_dict


@pytest.mark.parametrize("wrap", [lambda scaler: scaler, Wrapped])
def test_scaler_can_unscale_again_in_a_step_that_is_run_again(wrap: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    state = ProtectedState(model, [optimizer], [wrap(scaler)])
    snapshot = state.snapshot()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)

    state.restore(snapshot)

    scaler.unscale_(optimizer)


def test_object_without_a_state_is_refused() -> None:
    model = nn.Linear(2, 1)

    with pytest.raises(StateError, match="also has a int; allowed: modules, and objects with"):
        ProtectedState(model, [Adam(model.parameters())], [3])


def test_state_that_cannot_be_sent_is_refused() -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"pattern": object()}

        def load_state_dict(self, state_dict: Any) -> None: ...

    model = nn.Linear(2, 1)

    with pytest.raises(StateError, match="no other process can be given"):
        ProtectedState(model, [Adam(model.parameters())], [Odd()])


def test_optimizer_of_other_parameters_is_refused() -> None:
    model = nn.Linear(2, 1)

    with pytest.raises(StateError, match=r"Adam updates a parameter of shape \(3, 2\) that is not"):
        ProtectedState(model, [Adam(nn.Linear(2, 3).parameters())], [])


def test_forgotten_scheduler_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = MultiStepLR(optimizer, milestones=[1])

    with pytest.raises(StateError, match="a scheduler of SGD is not in also=: add it"):
        ProtectedState(model, [optimizer], [])
    ProtectedState(model, [optimizer], [scheduler])


def test_parameter_of_another_optimizer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    with pytest.raises(StateError, match=r"no optimizer that protect was given updates '1.weight'"):
        ProtectedState(model, [SGD(model[0].parameters(), lr=0.1)], [])


def test_modes_of_modules_are_put_back_and_travel() -> None:
    state, model, *_ = make()
    snapshot, rest = state.snapshot(), state.read_rest()

    model.eval()
    state.restore(snapshot)
    assert model.training
    model[1].eval()  # type: ignore[index, operator]
    state.write_rest(rest)
    assert all(each.training for each in model.modules())


@pytest.mark.parametrize("change", ["frozen", "group", "buffer"])
def test_parameters_that_a_loop_freezes_or_adds_are_refused(change: str) -> None:
    state, model, optimizer, _ = make()
    if change == "frozen":
        model.requires_grad_(requires_grad=False)
    elif change == "buffer":
        model[1].running_mean = torch.zeros(3, dtype=torch.float64)  # type: ignore[index, union-attr]
    else:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    with pytest.raises(StateError, match="requires_grad, an optimizer's parameters, or a buffer"):
        state.snapshot()


@pytest.mark.parametrize(
    ("state", "is_equal"),
    [({"a": [1, torch.ones(2)]}, True), ({"a": [1, torch.zeros(2)]}, False), ({"b": [1]}, False)],
)
def test_state_of_ranks_is_compared_by_its_values(state: Any, *, is_equal: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meters = [
        SimpleNamespace(state_dict=lambda each=each: each, load_state_dict=lambda _: None)
        for each in ({"a": [1, torch.ones(2)]}, state)
    ]
    first, other = (ProtectedState(model, [optimizer], [each]).digest_also() for each in meters)

    assert (first == other) is is_equal


def test_optimizer_around_another_is_unwrapped_where_it_is_accelerates_alone() -> None:
    """Others keep state of their own, such as Lookahead's slow weights."""
    inner = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for module, found in (("accelerate.optimizer", "inner"), ("user", "outer")):
        outer = type("Outer", (SGD,), {"__module__": module})(inner.param_groups, lr=0.1)
        outer.optimizer = inner
        assert unwrap(outer) is {"inner": inner, "outer": outer}[found]

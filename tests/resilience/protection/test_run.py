"""A protected loop in a process without an agent, and what a program may not do in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import resilience
from resilience.errors import StateError


def make_run(seed: int = 0) -> tuple[resilience.Run, nn.Module, SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    return resilience.protect(model, optimizer, seed=seed), model, optimizer


def train(num_steps: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    run, model, optimizer = make_run(seed)
    told: list[int] = []
    run.every(2, told.append)
    for inputs in run.steps([torch.ones(3, 2), torch.zeros(3, 2)], until=num_steps):
        with run.step():
            model(inputs).sum().backward()
            optimizer.step(None)  # accelerate's optimizers give a closure that is none
            optimizer.zero_grad()
    assert run.index == num_steps
    return told, model[0].weight.detach()  # type: ignore[index, union-attr, return-value]


def test_steps_are_taken_and_functions_called_between_them() -> None:
    assert train(5)[0] == [2, 4]


def test_random_numbers_follow_from_the_seed() -> None:
    assert torch.equal(train(4)[1], train(4)[1])
    assert not torch.equal(train(4)[1], train(4, seed=1)[1])


def test_fault_of_a_process_without_an_agent_is_its_own() -> None:
    run, *_ = make_run()

    with pytest.raises(RuntimeError, match="mine"):  # noqa: PT012
        for _ in run.steps([1], until=1):
            with run.step():
                raise RuntimeError("mine")


def take_step(run: resilience.Run, act: Any) -> None:
    for _ in run.steps([1], until=1):
        with run.step():
            act()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param("step_outside", "optimizer.step() outside `with run.step():`", id="update"),
        pytest.param("log_outside", "run.log() outside `with run.step():`", id="log"),
        pytest.param("closure", "optimizer.step(closure) computes gradients after", id="closure"),
        pytest.param("twice", "`with run.step():` without a batch of its own", id="twice"),
        pytest.param("left_out", "no `with run.step():` for the last batch", id="left-out"),
        pytest.param("two_loops", "run.steps() a second time", id="two-loops"),
        pytest.param("late_load", "run.load_state_dict() after run.steps()", id="late-load"),
        pytest.param("late_every", "run.every() after run.steps()", id="late-every"),
        pytest.param("stop_outside", "run.stop() between steps", id="stop"),
        pytest.param("late_stop", "run.stop() after optimizer.step()", id="late-stop"),
        pytest.param("never", "run.every(0, ...); allowed: 1 and more", id="every-0"),
        pytest.param("nested", "`with run.step():` within another one", id="nested"),
    ],
)
def test_misuse_is_named_with_its_remedy(act: str, words: str) -> None:
    run, _, optimizer = make_run()

    def nest() -> None:
        with run.step():
            pass

    acts = {
        "step_outside": optimizer.step,
        "log_outside": lambda: run.log(loss=1.0),
        "closure": lambda: take_step(run, lambda: optimizer.step(lambda: 1.0)),
        "nested": lambda: take_step(run, nest),
        "twice": lambda: [(nest(), nest()) for _ in run.steps([1], until=1)],
        "left_out": lambda: list(run.steps([1], until=2)),
        "two_loops": lambda: (run.steps([1], until=1), run.steps([1], until=2)),
        "late_load": lambda: (run.steps([1], until=1), run.load_state_dict(run.state_dict())),
        "late_every": lambda: (run.steps([1], until=1), run.every(1, print)),
        "stop_outside": run.stop,
        "late_stop": lambda: take_step(run, lambda: (optimizer.step(), run.stop())),
        "never": lambda: run.every(0, print),
    }
    with pytest.raises(StateError) as raised:
        acts[act]()
    assert str(raised.value).startswith(words)


def test_stop_ends_the_loop_once_the_step_counts() -> None:
    run, *_ = make_run()

    for _ in run.steps([1, 2], until=10):
        with run.step():
            if run.index == 3:
                run.stop()

    assert run.index == 4
    assert "is_last" not in run.state_dict()["cursor"], "a checkpoint is continued"


def test_stop_in_a_function_ends_the_loop_behind_it() -> None:
    run, *_ = make_run()
    run.every(2, lambda step: run.stop() if step == 4 else None)

    for _ in run.steps([1, 2], until=10):
        with run.step():
            pass

    assert run.index == 4


def test_loop_that_is_left_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run, *_ = make_run()

    for _ in run.steps([1, 2], until=10):
        with run.step():
            pass
        break

    assert "the loop over run.steps() was left at step 1 of 10, where" in capsys.readouterr().err


@pytest.mark.parametrize("left_out", [set(), {"cursor"}])
def test_checkpoint_of_ones_own_is_continued_with_the_same_batches_and_numbers(
    left_out: set[str],
) -> None:
    def train(run: resilience.Run, model: nn.Module, optimizer: SGD, until: int) -> list[float]:
        losses = []
        for inputs in run.steps([torch.full((3, 2), float(n)) for n in range(3)], until=until):
            with run.step():
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    whole = train(*make_run(), 7)
    first, model, optimizer = make_run()
    begun = train(first, model, optimizer, 4)
    saved = {key: each for key, each in first.state_dict().items() if key not in left_out}
    second, other, its_optimizer = make_run()
    other.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    second.load_state_dict(saved)

    assert begun + train(second, other, its_optimizer, 7) == whole


def test_optimizer_whose_state_cannot_travel_is_refused_in_its_first_step() -> None:
    class Odd(SGD):
        def step(self, closure: Any = None) -> None:
            self.state[self.param_groups[0]["params"][0]]["odd"] = object()

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    run = resilience.protect(model, Odd(model.parameters(), lr=0.1))

    with pytest.raises(StateError, match="neither a tensor nor plain data"):
        take_step(run, lambda: None if run.index else run._optimizers[0].step())


def test_epochs_permutation_is_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler may give each rank its part of one."""
    found = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        run, *_ = make_run()
        order: list[int] = []
        for each in run.steps(Permuted(), until=8):
            order.append(each)
            with run.step():
                pass
        found.append(order)

    assert found[0] == found[1]


class Permuted:
    def __iter__(self) -> Any:
        return iter(torch.randperm(8).tolist())


def test_evaluation_leaves_the_modes_as_they_are() -> None:
    run, model, _ = make_run()
    model[1].eval()  # type: ignore[index]
    run.every(1, lambda step: model.eval())

    take_step(run, lambda: None)

    assert [each.training for each in model] == [True, False, True]  # type: ignore[union-attr]
    assert model.training


def test_log_goes_out_with_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    run, *_ = make_run()

    take_step(run, lambda: run.log(loss=0.5))

    assert "0.5" in capsys.readouterr().out


def test_import_of_the_package_needs_no_torch() -> None:
    assert "protect" in resilience.__all__
    with pytest.raises(AttributeError, match="no attribute 'protects'"):
        resilience.protects  # type: ignore[attr-defined]  # noqa: B018


def test_forward_in_training_mode_behind_the_update_is_refused_where_ranks_share_buffers() -> None:
    """The buffers that it changes would be lost with rank 0."""
    run, model, optimizer = make_run()
    run._binding.shares_buffers = True

    with pytest.raises(StateError, match="a forward in training mode after"):
        take_step(run, lambda: (optimizer.step(), model(torch.ones(3, 2))))
    between, model, _ = make_run()
    between._binding.shares_buffers = True
    with pytest.raises(StateError, match="or between steps changes buffers on each rank"):
        list(map(model, between.steps([torch.ones(3, 2)], until=2)))


def test_function_between_steps_that_writes_a_parameter_is_refused() -> None:
    run, model, _ = make_run()
    run.every(1, lambda step: nn.init.zeros_(model[0].weight))  # type: ignore[index, arg-type]

    with pytest.raises(StateError, match="a parameter was written by a function"):
        take_step(run, lambda: None)


def test_parameter_that_is_written_before_the_update_is_refused() -> None:
    """Where the step is run again it would be written twice."""
    run, model, _ = make_run()

    with pytest.raises(StateError, match="a parameter was written between the begin of the step"):
        take_step(run, lambda: nn.init.zeros_(model[0].weight))  # type: ignore[index, arg-type]
    between, model, _ = make_run()
    with pytest.raises(StateError, match="a parameter was written between steps, and"):  # noqa: PT012
        for _ in between.steps([1], until=2):
            nn.init.zeros_(model[0].weight)  # type: ignore[index, arg-type]
            with between.step():
                pass

"""References to process groups are found, and set to those of another generation."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, ProcessGroup

from resilience.comm.bindings import Bindings, Outlived
from resilience.errors import StateError


@pytest.fixture
def groups() -> list[ProcessGroup]:
    """Two groups, and two that are to take their places."""
    return [ProcessGroup(HashStore(), 0, 1) for _ in range(4)]


@dataclass
class Options:
    tensor_group: Any = None
    number: int = 3


class Layer(nn.Module):
    def __init__(self, options: Options, group: ProcessGroup) -> None:
        super().__init__()
        self.options = options
        self.group = group
        self.weight = nn.Parameter(torch.ones(2))
        # As a framework marks its parameters.
        self.weight.of_group = group  # type: ignore[attr-defined]
        self.call = lambda: group


def test_every_place_that_holds_a_group_is_set(groups: list[ProcessGroup]) -> None:
    first, second, other_first, other_second = groups
    options = Options(tensor_group=second)
    layer = Layer(options, first)
    model = nn.Sequential(layer, Layer(options, second))
    lists = [first, [second], {"inner": first}]

    bindings = Bindings([first, second], [model, lists])
    bindings.rebind([other_first, other_second])

    assert layer.group is other_first
    assert layer.weight.of_group is other_first  # type: ignore[attr-defined]
    assert layer.call() is other_first
    assert options.tensor_group is other_second
    assert lists == [other_first, [other_second], {"inner": other_first}]
    # Seen by another walk: no place is left that has one of those before.
    again = Bindings([other_first, other_second], [model, lists])
    assert len(again) == len(bindings)


def test_objects_that_refer_to_each_other_are_looked_at_once(groups: list[ProcessGroup]) -> None:
    one: dict[str, Any] = {"group": groups[0]}
    one["self"] = one
    one["method"] = threading.Event().set

    assert len(Bindings(groups, [one, one])) == 1


def test_a_group_that_nobody_opened_is_named(groups: list[ProcessGroup]) -> None:
    with pytest.raises(StateError, match="'group' of a dict holds an unknown group"):
        Bindings(groups[:1], [{"group": groups[1]}])


def test_a_group_that_cannot_be_replaced_is_named(groups: list[ProcessGroup]) -> None:
    with pytest.raises(StateError, match="a tuple holds a group for good"):
        Bindings(groups, [{"pair": (groups[0], 1)}])


def test_a_group_stays_while_anybody_else_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(
        "resilience.comm.bindings.drop_groups",
        lambda groups: (dropped.append(len(groups)), groups.clear()),
    )
    held = ProcessGroup(HashStore(), 0, 1)
    outlived = Outlived()
    outlived.add([held, ProcessGroup(HashStore(), 0, 1)])

    outlived.drop()
    outlived.drop()
    assert dropped == [1]

    del held
    outlived.drop()
    outlived.drop()
    assert dropped == [1, 1]
    assert not dist.is_initialized()

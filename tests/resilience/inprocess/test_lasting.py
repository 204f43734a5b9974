"""Groups of a set-up: torch takes them for its own, their results are noted and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from resilience.comm.world import forget_world
from resilience.errors import StateError
from resilience.inprocess import lasting
from resilience.inprocess.lasting import LastingGroup, SetUp, begin_set_up, bind_groups, end_set_up


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    end_set_up()
    lasting._lasting.clear()
    LastingGroup.check_calls(lambda name: None)
    forget_world()


def open_alone(set_up: SetUp) -> None:
    begin_set_up(set_up)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def sum_of(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def gather(value: object) -> list[Any]:
    found: list[Any] = [None]
    dist.all_gather_object(found, value)
    return found


def test_torch_has_the_names_that_are_replaced() -> None:
    """They are private: with a torch that has others this test fails first."""
    real = distributed_c10d.ProcessGroupGloo

    open_alone(SetUp())

    assert isinstance(dist.group.WORLD, LastingGroup)
    assert dist.get_backend() == "gloo"
    end_set_up()
    assert distributed_c10d.ProcessGroupGloo is real


def test_set_up_that_is_run_alone_gets_what_the_first_one_got() -> None:
    open_alone(SetUp())
    first = SetUp() if lasting.current_set_up() is None else lasting.current_set_up()
    told = (sum_of(3.0), gather({"name": "first"}))
    dist.barrier()
    assert first is not None
    notes = first.write_notes()
    end_set_up()
    forget_world()

    open_alone(SetUp(lambda: notes))
    replayed = (sum_of(5.0), gather({"name": "other"}))
    dist.barrier()

    assert told == replayed == (3.0, [{"name": "first"}])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param(
            dist.barrier,
            r"calls barrier of \[\] where the first set-up called allreduce",
            id="another",
        ),
        pytest.param(
            lambda: sum_of(1.0) + sum_of(2.0),
            "first set-up called no collec.* each time: let rank 0 broadcast, as a tensor, which",
            id="one-more",
        ),
        pytest.param(
            lambda: dist.all_reduce(torch.zeros(2)),
            r"calls allreduce of \['float32\[2\]'\] where the first set-up called allreduce "
            r"of \['float32\[1\]'\]",
            id="shape",
        ),
    ],
)
def test_set_up_that_differs_is_named(act: Callable[[], object], words: str) -> None:
    open_alone(SetUp())
    sum_of(1.0)
    set_up = end_set_up()
    assert set_up is not None
    forget_world()
    open_alone(SetUp(set_up.write_notes))

    with pytest.raises(StateError, match=words):
        act()


def test_large_results_are_refused_in_the_first_set_up() -> None:
    open_alone(SetUp())

    with pytest.raises(StateError, match="allreduce in the set-up leaves 8000000 bytes; a process"):
        dist.all_reduce(torch.zeros(2_000_000))


def test_large_weights_that_ddp_shares_are_not_noted_and_not_refused() -> None:
    open_alone(SetUp())
    set_up = lasting.current_set_up()
    assert set_up is not None

    DistributedDataParallel(nn.Linear(1000, 1000))

    assert len(set_up.write_notes()) < 10_000


def test_root_that_broadcasts_other_bytes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def tell(name: str) -> str:
        told = [name]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    open_alone(SetUp())
    tell("noon")
    set_up = end_set_up()
    assert set_up is not None
    forget_world()
    open_alone(SetUp(set_up.write_notes))
    tell("late")

    assert (
        "other bytes than the first one did, which it is given in their place"
        in capsys.readouterr().err
    )


def test_group_forwards_to_that_of_each_generation_and_is_found_by_its_name() -> None:
    open_alone(SetUp())
    group = dist.group.WORLD
    assert isinstance(group, LastingGroup)
    name, called = group.group_name, list[str]()
    end_set_up()
    LastingGroup.check_calls(called.append)

    for _ in range(2):
        forget_world()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        bind_groups()

        assert dist.group.WORLD is group
        assert distributed_c10d._resolve_process_group(name) is group
        assert sum_of(4.0) == 4.0
    assert called == ["allreduce"] * 2


class Begun(dist.Work):
    """A collective that notes by its wait that Python waits for it."""

    num_waits = 0

    def wait(self, timeout: Any = None) -> bool:
        Begun.num_waits += 1
        return True


def test_collectives_that_torch_waits_for_beyond_python_are_waited_for_in_it() -> None:
    """Only there does a wait end with its generation."""
    open_alone(SetUp())
    group = dist.group.WORLD
    assert isinstance(group, LastingGroup)
    end_set_up()
    group.forward_to(SimpleNamespace(allreduce=lambda *given: Begun()))

    dist.all_reduce(torch.ones(1), async_op=True)
    assert Begun.num_waits == 0
    begun = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name)
    assert Begun.num_waits == 1
    torch.ops._c10d_functional.wait_tensor(begun)


def test_notes_are_told_by_the_first_rank_of_a_group_or_by_their_owner() -> None:
    assert lasting._is_told_by("2,3/0/1", 2)
    assert not lasting._is_told_by("2,3/0/1", 3)
    assert lasting._is_told_by("2,3/0/1/3", 3)
    assert json.loads(SetUp().write_notes()) == {}

from __future__ import annotations

import copy
import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from resilience.state import shared as shared_module
from resilience.state.digest import digest_state
from resilience.state.shared import ALIGNMENT_BYTES, SharedState
from resilience.state.state_files import create_state_files
from resilience.state.torch_state import TorchState, materialise
from tests.disks import files_of_at_most
from tests.resilience.state.nodes import PlainView, opened_state_files
from tests.resilience.state.programs import odd_tensors


@pytest.fixture
def files() -> Iterator[list[int]]:
    with opened_state_files(2) as made:
        yield made


def contiguous(seed: int) -> PlainView:
    """Return tensors of many types and sizes, empty ones and scalars among them."""
    clones = [each.clone(memory_format=torch.contiguous_format) for each in odd_tensors(seed)]
    return PlainView(clones)


class Training:
    """A small model, its optimizer and its batches."""

    def __init__(self, **options: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
        self.optimizer = AdamW(self.model.parameters(), lr=0.1, **options)
        materialise(self.optimizer)
        self.state = TorchState(self.model, self.optimizer)
        self._draw = torch.Generator().manual_seed(1)

    def take_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.randn(9, 7, generator=self._draw)).square().sum().backward()
        self.optimizer.step()


def test_tensors_keep_values_and_objects_and_live_in_the_place(files: list[int]) -> None:
    view, before = contiguous(3), contiguous(3).content()
    objects = list(view.values)
    shared = SharedState(files)

    assert shared.adopt(view, 1)

    assert view.content() == before
    assert all(one is other for one, other in zip(objects, view.values, strict=True))
    assert shared.local_rank == 1
    assert shared.holds(view.tensors())
    begin = shared.own_bytes().ctypes.data
    full = [each for each in view.values if each.numel()]
    assert all(each.data_ptr() % ALIGNMENT_BYTES == 0 for each in full)
    assert all(0 <= each.data_ptr() - begin < len(shared.own_bytes()) for each in full)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in full)


def test_others_read_what_the_rank_writes(files: list[int]) -> None:
    view = PlainView([torch.zeros(100, dtype=torch.uint8)])
    shared, other = SharedState(files), SharedState(files)
    shared.adopt(view, 0)

    place = other.open_place(0, 100)
    view.values[0][99] = 7

    assert place[99] == 7
    with pytest.raises(ValueError, match="read-only"):
        place[99] = 8


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_training_in_shared_memory_has_the_same_bits(
    files: list[int], options: dict[str, bool]
) -> None:
    digests = []
    for is_shared in (False, True):
        training = Training(**options)
        training.take_step()
        shared = SharedState(files)
        assert not is_shared or shared.adopt(training.state, 0)
        for _ in range(3):
            training.take_step()
        digests.append(digest_state(training.state))
        assert shared.holds(training.state.tensors()) == is_shared

    assert digests[0] == digests[1]


def test_replaced_process_finds_what_the_dead_one_left(files: list[int]) -> None:
    """But the first state of a process replaces that."""
    SharedState(files).adopt(contiguous(3), 1)
    view, first, spare = contiguous(4), contiguous(4), SharedState(files)
    spare.prepare()

    assert spare.adopt(view, 1, is_overwritten=True)
    assert view.content() == contiguous(3).content()

    assert SharedState(files).adopt(first, 1)
    assert first.content() == contiguous(4).content()


def test_state_of_a_replaced_process_is_zeros_where_nobody_was(files: list[int]) -> None:
    view = contiguous(4)

    assert SharedState(files).adopt(view, 1, is_overwritten=True)

    assert not any(each.any() for each in view.values)


def test_place_grows_and_those_who_have_mapped_it_map_it_again(files: list[int]) -> None:
    own, other = SharedState(files), SharedState(files)
    own.adopt(PlainView([torch.zeros(10)]), 0)
    other.prepare()
    larger = PlainView([torch.full((mmap.PAGESIZE * 3,), 5, dtype=torch.uint8)])

    assert own.adopt(larger, 0)

    place = other.open_place(0, mmap.PAGESIZE * 3)
    assert (place == 5).all()
    larger.values[0][-1] = 6
    other.prepare()
    assert other.open_place(0, mmap.PAGESIZE * 3)[-1] == 6


def test_tensors_change_their_order_within_a_place(files: list[int]) -> None:
    """Each lies where another one goes: none may be written over before it is read."""
    view, shared = contiguous(3), SharedState(files)
    shared.adopt(view, 0)
    turned = PlainView(list(reversed(view.values)))

    assert shared.adopt(turned, 0)

    assert turned.content() == list(reversed(contiguous(3).content()))
    assert shared.holds(turned.tensors())
    assert not shared.holds(view.tensors())


def test_place_is_known_to_be_left_when_training_rebinds_a_tensor(files: list[int]) -> None:
    training, shared = Training(), SharedState(files)
    shared.adopt(training.state, 0)
    training.model[0].bias.data = torch.zeros(33)  # type: ignore[union-attr]

    assert not shared.holds(training.state.tensors())
    assert shared.adopt(training.state, 0)
    assert shared.holds(training.state.tensors())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [torch.zeros(4, 6).t()], id="strides"),
        pytest.param(lambda: [torch.zeros(10)[2:]], id="part-of-a-storage"),
        pytest.param(lambda: [torch.zeros(3)] * 2, id="twice"),
        pytest.param(lambda: [torch.zeros(3, device="meta")], id="device"),
        pytest.param(list, id="nothing"),
        pytest.param(lambda: [torch.empty(0)], id="empty"),
    ],
)
def test_tensors_that_cannot_be_moved_stay(
    files: list[int], make: Callable[[], list[Tensor]]
) -> None:
    values, shared = make(), SharedState(files)
    pointers = [each.data_ptr() for each in values]

    assert not shared.adopt(PlainView(values), 0)

    assert pointers == [each.data_ptr() for each in values]
    assert shared.local_rank is None
    assert os.fstat(files[0]).st_size == 0


def test_subclass_of_a_tensor_stays() -> None:
    training = Training()
    assert training.state.owners() is not None

    class Own(nn.Parameter):
        pass

    training.model.register_parameter("own", Own(torch.zeros(3)))

    assert training.state.owners() is None


@pytest.mark.parametrize("num_before", [0, 2])
def test_tensors_return_where_memory_ends_on_the_way(
    files: list[int], monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    view, shared = contiguous(3), SharedState(files)
    left, allocate = [None] * num_before, os.posix_fallocate

    def full(file: int, begin: int, size: int) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "no memory left")
        left.pop()
        allocate(file, begin, size)

    monkeypatch.setattr(shared_module, "_PIECE_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(os, "posix_fallocate", full)

    assert not shared.adopt(view, 0)

    assert view.content() == contiguous(3).content()
    assert shared.local_rank is None
    monkeypatch.undo()
    SharedState(files).prepare()
    assert os.fstat(files[0]).st_blocks == 0, "who maps the place does not take the memory again"
    assert shared.adopt(view, 0)
    assert view.content() == contiguous(3).content()


def test_place_that_cannot_grow_leaves_ordinary_memory(files: list[int]) -> None:
    """A limit on files' sizes stands for a full memory."""
    shared = SharedState(files)
    values = [torch.full((600_000,), n, dtype=torch.uint8) for n in (1, 2)]

    with files_of_at_most(1 << 20):
        assert not shared.adopt(PlainView(values), 0)
        assert [int(each.sum()) for each in values] == [600_000, 1_200_000]
        assert shared.adopt(PlainView(values[:1]), 0)


def test_a_process_without_a_rank_has_the_memory_made_for_any(files: list[int]) -> None:
    num_pages = 1 << 12
    view = PlainView([torch.ones(num_pages * mmap.PAGESIZE, dtype=torch.uint8)])
    spare = SharedState(files)

    spare.reserve(view)

    sizes = [os.fstat(each) for each in files]
    assert [each.st_size for each in sizes] == [num_pages * mmap.PAGESIZE] * 2
    assert all(each.st_blocks * 512 >= each.st_size for each in sizes)
    assert view.values[0].all(), "its tensors stay where they are"
    assert spare.local_rank is None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert spare.adopt(view, 1, is_overwritten=True)
    view.values[0].fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < num_pages // 4


@pytest.mark.parametrize("pid", [100, 101])
def test_processes_that_start_together_begin_with_different_places(
    files: list[int], monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    allocate, asked = os.posix_fallocate, []

    def note(file: int, begin: int, size: int) -> None:
        asked.append(files.index(file))
        allocate(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", note)
    monkeypatch.setattr(os, "getpid", lambda: pid)

    SharedState(files).reserve(contiguous(3))

    assert asked == [pid % 2, 1 - pid % 2]


def test_who_reserves_changes_no_place_that_is_in_use(files: list[int]) -> None:
    view, own = contiguous(3), SharedState(files)
    own.adopt(view, 0)

    SharedState(files).reserve(contiguous(4))

    assert view.content() == contiguous(3).content()
    assert own.holds(view.tensors())


def test_a_place_is_not_made_smaller_while_others_may_read_it(files: list[int]) -> None:
    SharedState(files).adopt(PlainView([torch.ones(100_000)]), 0)
    size = os.fstat(files[0]).st_size

    SharedState(files).reserve(PlainView([torch.ones(5000)]))

    assert os.fstat(files[0]).st_size == size


def test_nothing_is_reserved_for_tensors_that_stay(files: list[int]) -> None:
    SharedState(files).reserve(PlainView([torch.ones(50, 100).t()]))

    assert [os.fstat(each).st_size for each in files] == [0, 0]


def test_smaller_place_than_asked_for_is_an_error(files: list[int]) -> None:
    with pytest.raises(ValueError, match="place 1 has 0 bytes, not 5"):
        SharedState(files).open_place(1, 5)


def test_places_have_no_names_and_go_with_their_last_holder() -> None:
    made = create_state_files(1)
    view, shared = PlainView([torch.ones(5000)]), SharedState(made)
    shared.adopt(view, 0)

    assert list(Path("/dev/shm").glob("*resilience*")) == []
    assert not os.get_inheritable(made[0])
    os.close(made[0])
    values = copy.deepcopy(view.values)
    assert "resilience-state" in Path("/proc/self/maps").read_text()
    del view, shared
    assert "resilience-state" not in Path("/proc/self/maps").read_text()
    assert values[0].sum() == 5000

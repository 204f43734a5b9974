"""Batches by step: in order, once each, and the same for a process that joins later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resilience.errors import StateError
from resilience.protection.batches import Batches
from resilience.state.rng import seed_from


def seed(*place: object, is_shared: bool = False) -> None:
    seed_from("/".join(map(str, (*place, is_shared))))


def read_all(loader: Any, num_steps: int, num_batches: int = 1) -> list[tuple[dict[str, Any], Any]]:
    batches, cursor, found = Batches(loader, num_batches, seed), dict[str, Any](), []
    for step in range(num_steps):
        cursor, batch = batches.read(cursor, step)
        found.append((cursor, batch))
    return found


class Drawn:
    """A dataset whose samples are drawn."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.rand(2) + number


def make_loader(
    num_workers: int, *, keeps: bool = False, generator: torch.Generator | None = None
) -> DataLoader[Any]:
    return DataLoader(
        Drawn(),  # type: ignore[arg-type]
        generator=generator,
        batch_size=3,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=keeps,
    )


def test_epochs_follow_each_other() -> None:
    found = read_all(["a", "b", "c"], 7)

    assert [batch for _, batch in found] == ["a", "b", "c", "a", "b", "c", "a"]
    assert found[4][0] == {"step": 4, "epoch": 1, "position": 1}


def test_batches_left_over_at_an_epochs_end_are_left_out() -> None:
    found = read_all([1, 2, 3, 4, 5], 4, num_batches=2)

    assert [batch for _, batch in found] == [[1, 2], [3, 4], [1, 2], [3, 4]]


@pytest.mark.parametrize("step", range(1, 5))
def test_place_of_a_step_is_found_where_a_checkpoint_has_no_cursor(step: int) -> None:
    found = read_all([1, 2, 3, 4, 5], 5, num_batches=2)

    assert Batches([1, 2, 3, 4, 5], 2, seed).read({}, step) == found[step]
    with pytest.raises(StateError, match=f"a checkpoint has step {step} and no cursor, and the"):
        Batches(map, 2, seed).read({}, step)  # type: ignore[arg-type]


def test_iterable_without_length_is_read_epoch_after_epoch() -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            yield from (1, 2)

    assert [batch for _, batch in read_all(Stream(), 5)] == [1, 2, 1, 2, 1]


def test_same_step_has_the_same_batch() -> None:
    batches = Batches(iter_once := [1, 2, 3], 1, seed)
    cursor, first = batches.read({}, 0)

    assert batches.read(cursor, 0) == (cursor, first)
    assert iter_once == [1, 2, 3]


@pytest.mark.parametrize(("num_workers", "keeps"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("step", [2, 6])
def test_process_that_joins_reads_the_same(num_workers: int, keeps: bool, step: int) -> None:
    """Shuffling and drawn samples included, from the cursor of the step or of the one before."""
    found = read_all(make_loader(num_workers, keeps=keeps), 9)

    for before in (found[step][0], found[step - 1][0]):
        cursor, batch = Batches(make_loader(num_workers, keeps=keeps), 1, seed).read(before, step)
        assert cursor == found[step][0]
        assert torch.equal(batch, found[step][1])


def test_process_that_joins_reads_the_same_from_a_loader_with_a_generator() -> None:
    found = read_all(make_loader(0, generator=torch.Generator()), 9)

    loader = make_loader(0, generator=torch.Generator())
    assert torch.equal(Batches(loader, 1, seed).read(found[6][0], 6)[1], found[6][1])


def test_batch_that_the_program_writes_to_is_the_same_again() -> None:
    batches = Batches([{"x": torch.ones(2)}], 1, seed)
    cursor, first = batches.read({}, 0)
    first["x"].mul_(7)

    assert torch.equal(batches.read(cursor, 0)[1]["x"], torch.ones(2))


def test_iterator_is_refused() -> None:
    with pytest.raises(StateError, match="got a list_iterator, which can be read once"):
        Batches(iter([1]), 1, seed)


def test_loader_with_too_few_batches_is_refused() -> None:
    with pytest.raises(StateError, match="fewer batches in an epoch than the 3 of a step"):
        Batches([1, 2], 3, seed).read({}, 0)


def test_no_batches_of_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulate is 0; allowed: 1 and more"):
        Batches([1], 0, seed)


def test_batches_left_over_make_a_step_where_they_are_kept() -> None:
    batches = Batches([0, 1, 2, 3, 4], 2, seed, keeps_rest=True)
    cursor: dict[str, object] = {}
    found = []
    for step in range(4):
        cursor, read = batches.read(cursor, step)
        found.append(read)
    assert found == [[0, 1], [2, 3], [4], [0, 1]]

    late = Batches([0, 1, 2, 3, 4], 2, seed, keeps_rest=True)
    assert late.read({}, 5)[1] == [4]


def test_accelerates_loader_whose_first_rank_reads_for_all_is_refused() -> None:
    class DataLoaderDispatcher(list[int]):
        """accelerate's class, by its name."""

    with pytest.raises(StateError, match="set dispatch_batches to False"):
        Batches(DataLoaderDispatcher(), 1, seed)

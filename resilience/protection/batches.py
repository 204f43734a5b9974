"""The batches of each step, read again up to a place by a process that joins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from resilience.errors import StateError


class Batches:
    """Reads a loader epoch after epoch; a cursor says where a step's batches begin.

    The cursor is plain data: epoch, position in it, and the step whose batches begin there.
    `seed_at` is called with a place before the loader is asked for what lies there. Batches that
    are left over at an epoch's end are left out, or with `keeps_rest` those of a step.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        num_batches: int,
        seed_at: Callable[..., None],
        *,
        keeps_rest: bool = False,
    ) -> None:
        if num_batches < 1:
            raise ValueError(f"accumulate is {num_batches}; allowed: 1 and more")
        if isinstance(loader, Iterator):
            raise StateError(
                f"run.steps() got a {type(loader).__name__}, which can be read once; give it the "
                "loader or list behind that"
            )
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise StateError(
                "rank 0 of accelerate's loader sends batches to the others, and a process that "
                "joins would get none; set dispatch_batches to False"
            )
        if hasattr(loader, "rng_types"):
            loader.rng_types = None  # else accelerate broadcasts while a batch is fetched
        self._loader = loader
        self._num_batches = num_batches
        self._keeps_rest = keeps_rest
        self._seed_at = seed_at
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._position = -1
        self._held: tuple[int, list[Any]] | None = None
        """The last step that was read, and its batches."""

    def read(self, cursor: dict[str, Any], step: int) -> tuple[dict[str, Any], Any]:
        """Return the cursor and the batches of a step, given the cursor of it or of the one before.

        Raises StateError for a loader that ends before a step's first batch.
        """
        if self._held is not None and self._held[0] == step and cursor.get("step") == step:
            return cursor, self._hand_out()
        if not cursor and step:
            cursor = self._find_place(step)
        epoch, position = cursor.get("epoch", 0), cursor.get("position", 0)
        if cursor and cursor["step"] != step:
            position += self._num_batches
        batches = self._read_at(epoch, position)
        if batches is None:
            epoch, position = epoch + 1, 0
            if (batches := self._read_at(epoch, position)) is None:
                raise StateError(
                    f"the loader has fewer batches in an epoch than the {self._num_batches} of a "
                    "step; give it more data or accumulate less"
                )
        self._held = (step, batches)
        return {"step": step, "epoch": epoch, "position": position}, self._hand_out()

    def _find_place(self, step: int) -> dict[str, Any]:
        """Return the cursor of a step, given that the epochs before it were whole ones."""
        try:
            num_batches = len(self._loader)  # type: ignore[arg-type]
        except TypeError as error:
            raise StateError(
                f"a checkpoint has step {step} and no cursor, and the loader no length; save all "
                "of run.state_dict()"
            ) from error
        num_batches += self._num_batches - 1 if self._keeps_rest else 0
        epoch, step_of_epoch = divmod(step, max(num_batches // self._num_batches, 1))
        return {"step": step, "epoch": epoch, "position": step_of_epoch * self._num_batches}

    def _hand_out(self) -> Any:
        assert self._held is not None
        # A program may write to its batch, and the step may be run again.
        batches = copy.deepcopy(self._held[1])
        return batches[0] if self._num_batches == 1 else batches

    def _read_at(self, epoch: int, position: int) -> list[Any] | None:
        """Return the batches from a position on; None where the epoch ends before the last."""
        if self._iterator is None or epoch != self._epoch or position < self._position:
            self._begin_epoch(epoch)
        assert self._iterator is not None
        found: list[Any] = []
        while len(found) < self._num_batches:
            self._seed_at("data", epoch, self._position)
            try:
                batch = next(self._iterator)
            except StopIteration:
                return found if found and self._keeps_rest else None
            if self._position >= position:
                found.append(batch)
            self._position += 1
        return found

    def _begin_epoch(self, epoch: int) -> None:
        for owner in find_owners(self._loader):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        base: Any = getattr(self._loader, "base_dataloader", self._loader)  # behind accelerate's
        if getattr(base, "persistent_workers", False):
            # An iterator that is used again draws no seed, and its workers keep their generators.
            base._iterator = None  # noqa: SLF001
        # A sampler may split one permutation between the ranks.
        self._seed_at("epoch", epoch, is_shared=True)
        for owner in find_owners(self._loader):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                # One of the loader's own has drawn for the epochs before, in this process alone.
                generator.manual_seed(torch.initial_seed())
        self._iterator = iter(self._loader)
        self._epoch, self._position = epoch, 0


def find_owners(loader: Any) -> list[Any]:
    """Return a loader and what chooses its samples."""
    found = [loader, getattr(loader, "sampler", None)]
    own = loader
    while (own := getattr(own, "batch_sampler", None)) is not None:  # accelerate's has another
        found += [own, getattr(own, "sampler", None)]
    return list({id(each): each for each in found if each is not None}.values())

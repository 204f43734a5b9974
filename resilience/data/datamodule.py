"""A data module whose batches come from the cache; a LightningDataModule where that is installed.

The user's own data module lives in the producers alone. The workers read what it yields, so
none of them pays for its datasets. Only where a trainer asks for `prepare_data` does a worker
make one for that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from resilience.data.json_text import Json
from resilience.data.loader import CachedLoader, cached
from resilience.data.sources import Source, Start, import_function, make_source, takes_start
from resilience.settings import MmapSettings

if TYPE_CHECKING:

    class _Base:
        trainer: Any = None
else:

    def _find_base() -> type:
        for name in ("lightning.pytorch", "pytorch_lightning"):
            if find_spec(name.partition(".")[0]) is not None:
                return import_module(name).LightningDataModule
        return object

    _Base = _find_base()


class CachedDataModule(_Base):
    """The batches of another data module, made ahead and kept over restarts. One thread.

    `make_module` is a function that other processes can import, a partial of one with JSON
    arguments, or a Source; it returns a data module with one loader a stage. Where it has a
    parameter `start`, the loaders of what it returns have to begin at `start.batch`.
    """

    def __init__(
        self,
        make_module: Callable[..., Any] | Source,
        settings: MmapSettings,
        *,
        identity: Mapping[str, Any],
        job: str,
        samples_per_batch: int = 1,
        val_samples_per_batch: int | None = None,
        rank: int = 0,
        size: int = 1,
        has_validation: bool = True,
        owner_pid: int | None = None,
    ) -> None:
        super().__init__()
        self._source = make_source(make_module)
        self._settings = settings
        self._options: dict[str, Any] = {
            "identity": identity,
            "job": job,
            "rank": rank,
            "size": size,
            "owner_pid": owner_pid,
        }
        self._samples_per_batch = samples_per_batch
        self._val_samples_per_batch = val_samples_per_batch or samples_per_batch
        self._has_validation = has_validation
        self._train: CachedLoader | None = None
        self._val: CachedLoader | None = None
        self._begun_at = 0
        """Samples consumed when the trainer's count of batches was `_num_trained_before`."""
        self._num_trained_before = 0
        self._complete = 0
        """Batch at which the newest checkpoint that is known to be complete would be resumed."""
        self._handed_out: int | None = None
        """The same of the checkpoint that was asked for last."""

    def prepare_data(self) -> None:
        """Let the user's module prepare its data, as a trainer asks of one worker a node."""
        module = _make_module(self._source, None)
        if prepare := getattr(module, "prepare_data", None):
            prepare()

    def setup(self, stage: str | None = None) -> None:
        """Do nothing: the user's module is set up where its batches are made."""

    def train_dataloader(self) -> _TrainBatches:
        """Return the training batches, each `for` from the first that was not trained on."""
        if self._train is None:
            self._num_trained_before = self._num_trained()
            self._train = self._open("train", self._samples_per_batch, self._begun_at)
            self._train.note_checkpoint(self._complete)
        return _TrainBatches(self)

    def val_dataloader(self) -> CachedLoader | list[Any]:
        """Return the validation batches, each `for` from the first; none without validation."""
        if not self._has_validation:
            return []
        if self._val is None:
            self._val = self._open("val", self._val_samples_per_batch, 0)
        return self._val

    def teardown(self, stage: str | None = None) -> None:
        """Leave the cache, whose files stay; the next dataloader opens it again."""
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training, for a checkpoint.

        A call says that the checkpoint of the call before is complete: the cache then keeps what a
        resume from that checkpoint needs, and nothing before.
        """
        consumed = self._samples_consumed()
        if self._handed_out is not None:
            self._note_complete(self._handed_out)
        self._handed_out = consumed // self._samples_per_batch
        return {"samples_consumed": consumed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken."""
        consumed = state_dict["samples_consumed"]
        self._begin_at(consumed)
        self._note_complete(consumed // self._samples_per_batch)
        self._handed_out = None

    def close(self, *, is_over: bool = False) -> None:
        """Let go of the cache; `is_over` says that the job is, so nothing more is made ahead."""
        self._begun_at = self._samples_consumed()
        loaders, self._train, self._val = (self._train, self._val), None, None
        for loader in loaders:
            if loader is not None:
                loader.close(is_over=is_over)

    def read_train(self) -> Iterator[Any]:
        """Yield the training batches from the first that was not trained on."""
        assert self._train is not None, "the data module was closed"
        if (consumed := self._samples_consumed()) != self._train.samples_consumed:
            # What was read ahead of an epoch's end comes again.
            self._begin_at(consumed)
        return iter(self._train)

    def _open(
        self, stage: Literal["train", "val"], samples_per_batch: int, samples_consumed: int
    ) -> CachedLoader:
        is_given_start = takes_start(import_function(self._source))
        function = "open_loader_at" if is_given_start else f"open_{stage}_loader"
        arguments: dict[str, Json] = {
            "reference": self._source.reference,
            "arguments": dict(self._source.arguments),
        }
        return cached(
            Source(f"{__name__}:{function}", arguments),
            self._settings,
            stage=stage,
            samples_per_batch=samples_per_batch,
            samples_consumed=samples_consumed,
            **self._options,
        )

    def _note_complete(self, number: int) -> None:
        self._complete = number
        if self._train is not None:
            self._train.note_checkpoint(number)

    def _begin_at(self, samples_consumed: int) -> None:
        self._begun_at = samples_consumed
        self._num_trained_before = self._num_trained()
        if self._train is not None:
            self._train.load_state_dict({"samples_consumed": samples_consumed})

    def _samples_consumed(self) -> int:
        """Return the samples that were trained on, where a trainer counts; else all handed out."""
        if self._train is None:
            return self._begun_at
        if getattr(self, "trainer", None) is None:
            return self._train.samples_consumed
        num_batches = self._num_trained() - self._num_trained_before
        return self._begun_at + num_batches * self._samples_per_batch

    def _num_trained(self) -> int:
        """Return how many batches a trainer of Lightning's has trained on, 0 without one."""
        trainer = getattr(self, "trainer", None)
        if trainer is None:
            return 0
        return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)


class _TrainBatches:
    """What a trainer iterates over.

    The batches have no state of their own: a trainer that found one would save the position that
    was read, which lies ahead of the one that was trained on.
    """

    def __init__(self, module: CachedDataModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[Any]:
        return self._module.read_train()


def open_train_loader(*, reference: str, arguments: Mapping[str, Any]) -> Any:
    """Return the training batches of a user's module; for a producer."""
    return _open_loader(Source(reference, arguments), None, "train")


def open_val_loader(*, reference: str, arguments: Mapping[str, Any]) -> Any:
    """Return the validation batches of a user's module; for a producer."""
    return _open_loader(Source(reference, arguments), None, "val")


def open_loader_at(start: Start, *, reference: str, arguments: Mapping[str, Any]) -> Any:
    """Return the batches of a user's module that begins where it is told to; for a producer."""
    return _open_loader(Source(reference, arguments), start, start.stage)


def _open_loader(source: Source, start: Start | None, stage: str) -> Any:
    module = _make_module(source, start)
    module.setup("fit")
    loader = module.train_dataloader() if stage == "train" else module.val_dataloader()
    if loader is None or isinstance(loader, (list, tuple, dict)):
        raise TypeError(
            f"{source.reference}: {stage}_dataloader() has returned a {type(loader).__name__}; "
            "want one loader, such as a DataLoader"
        )
    return loader


def _make_module(source: Source, start: Start | None) -> Any:
    function = import_function(source)
    if not takes_start(function):
        return function(**source.arguments)
    if start is None:
        start = Start(batch=0, samples_consumed=0, rank=0, size=1, stage="train")
    return function(start=start, **source.arguments)

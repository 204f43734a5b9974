"""What makes the batches: a function that another process can import, and its arguments.

The producer calls the function and iterates over what it returns. Nothing here imports torch: the
producer of a source without torch never imports it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from resilience.data.errors import ProducerError
from resilience.data.json_text import Json, to_json_text
from resilience.data.order import make_permutation

_REFERENCE = re.compile(r"([A-Za-z_][\w.]*|/.+\.py):([A-Za-z_]\w*)")
_SCRIPT_NAME = "__mp_main__"
"""Under what name the producer imports the script that was started, as multiprocessing does."""

Factory = Callable[..., Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """An importable function and the arguments that it is called with by name."""

    reference: str
    """`module:function`, or `/path/of/script.py:function` for one of the script that runs."""
    arguments: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _REFERENCE.fullmatch(self.reference):
            raise ValueError(
                f"{self.reference!r} refers to no function; want 'module:function', "
                "the function at the top of its module"
            )
        text = to_json_text(self.arguments, f"arguments of {self.reference}")
        # What the producer gets, whatever happens to the caller's lists afterwards.
        object.__setattr__(self, "arguments", json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the batches that a source returns have to begin, and for whom they are."""

    batch: int
    """Number of the first batch."""
    samples_consumed: int
    """Samples of the global order that stand before it, those of all positions together."""
    rank: int
    size: int
    """How many data-parallel positions there are; `rank` is one of them."""
    stage: Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What the `state_dict` of a loader said before it yielded a batch."""

    batch: int
    """Number of the batch that the loader yields first after `load_state_dict`."""
    state: Json


def make_source(factory: Factory | Source) -> Source:
    """Return how another process finds `factory`: a function, a partial of one, or a Source.

    Raises TypeError where that is not possible, with what to do instead: for lambdas, functions
    within functions, methods, and arguments that JSON cannot hold or the function does not take.
    """
    if isinstance(factory, Source):
        return factory
    function, arguments = factory, {}
    if isinstance(factory, functools.partial):
        function, arguments = factory.func, factory.keywords
        if factory.args:
            raise TypeError(
                f"the partial of {_name(function)} has arguments without a name; "
                f"give them by name: partial({_name(function)}, NAME=VALUE)"
            )
    source = Source(_reference(function), arguments)
    _check_arguments(function, source)
    return source


def digest_code(factory: Factory | Source) -> str:
    """Return a digest of the text of a factory's module.

    Empty for a Source, which belongs to a package with a version, and for a module without a file.
    """
    function = factory.func if isinstance(factory, functools.partial) else factory
    # Not by the function's code: that of a decorated one lies where its decorator does.
    module = None if isinstance(function, Source) else sys.modules.get(function.__module__)
    path = Path(getattr(module, "__file__", None) or "")
    return hashlib.blake2b(path.read_bytes()).hexdigest()[:32] if path.is_file() else ""


def import_function(source: Source) -> Any:
    """Return what a source refers to; raises ProducerError where it cannot be imported."""
    match = _REFERENCE.fullmatch(source.reference)
    assert match is not None  # a Source has checked that
    place, name = match.groups()
    try:
        module = _import_script(place) if place.startswith("/") else importlib.import_module(place)
    except ImportError as error:
        raise ProducerError(
            f"cannot import {source.reference}: {error}; the producer has the module path and "
            "the working folder of the process that made the loader"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ProducerError(
            f"{source.reference} does not exist: the module has no {name}; "
            "want a function at the top of the module"
        ) from error


def takes_start(function: Any) -> bool:
    """Return whether a function is told where its batches have to begin."""
    return "start" in inspect.signature(function).parameters


def open_source(source: Source, start: Start, state: SourceState | None = None) -> OpenSource:
    """Call the function and return its batches from `start.batch` on.

    A function with a parameter `start` is given it, and its batches begin there. Any other
    begins at batch 0, so what it returns is brought forward: by `load_state_dict` where
    `state` is of no later batch, the rest by reading and throwing away; with a warning
    where that is all there is. Raises ProducerError for a function that cannot be imported
    or called, and whatever the function itself raises.
    """
    function = import_function(source)
    _check_callable(function, source)
    if takes_start(function):
        loader = function(start=start, **source.arguments)
        return OpenSource(_check_loader(loader, source), start.batch, has_state=False)
    loader = _check_loader(function(**source.arguments), source)
    first = 0
    if state is not None and state.batch <= start.batch and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(state.state)
        first = state.batch
    elif start.batch:
        warnings.warn(_skipping_text(source, start.batch), RuntimeWarning, stacklevel=2)
    opened = OpenSource(loader, first)
    opened.skip_to(start.batch)
    return opened


class OpenSource(Iterator[Any]):
    """The batches of a loader, counted. One thread."""

    def __init__(self, loader: Any, first: int, *, has_state: bool = True) -> None:
        """`first` is the batch that it begins with; without a state none is kept of it."""
        self.next_batch = first
        """Number of the batch that comes next; after the end, of the first there is not."""
        self._loader = loader
        self._iterator = iter(loader)
        read_state = getattr(loader, "state_dict", None) if has_state else None
        self._read_state: Callable[[], Json] | None = read_state
        self._is_over = False

    def __next__(self) -> Any:
        """Return the next batch; after the end it stays at StopIteration."""
        if self._is_over:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._is_over = True
            raise
        self.next_batch += 1
        return batch

    def skip_to(self, number: int) -> None:
        """Read and throw away what stands before a batch, or all there is."""
        with suppress(StopIteration):
            while self.next_batch < number:
                next(self)

    def read_state(self) -> SourceState | None:
        """Return the loader's state before the next batch; None where it has none for JSON."""
        if self._read_state is None:
            return None
        try:
            text = to_json_text(self._read_state(), "state_dict()")
        except TypeError as error:
            self._read_state = None
            warnings.warn(
                f"the state of the {type(self._loader).__name__} is not kept: {error}; "
                "a new producer reads and throws away what stands before its first batch",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return SourceState(batch=self.next_batch, state=json.loads(text))

    def close(self) -> None:
        """Let go of the loader and of what it has started; a second call does nothing."""
        close = getattr(self._iterator, "close", None)
        self._is_over = True
        self._loader, self._iterator, self._read_state = None, iter(()), None
        if close is not None:
            close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBatchSampler:
    """Which samples of a map-style dataset form the batches of one position.

    For `DataLoader(dataset, batch_sampler=...)`. The samples of a batch of all positions are
    neighbours in one global order, and each position takes its share of them: the order is the same
    for any number of positions. The sampler begins behind `samples_consumed` samples at no cost.
    """

    num_samples: int
    seed: int
    samples_per_batch: int
    """Samples of all positions together."""
    rank: int = 0
    size: int = 1
    samples_consumed: int = 0
    shuffle: bool = True
    """Each epoch has an order of its own; else it is the dataset's."""
    num_epochs: int | None = None
    """After how many epochs it ends; a last batch that is not whole is left out."""

    def __post_init__(self) -> None:
        if min(self.num_samples, self.samples_per_batch) < 1 or self.samples_consumed < 0:
            raise ValueError(
                f"{self.num_samples} samples, {self.samples_per_batch} a batch and "
                f"{self.samples_consumed} consumed are not allowed; want 1, 1 and 0 or more"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"position {self.rank} of {self.size} does not exist; want 0 to {self.size - 1}"
            )
        if self.samples_per_batch % self.size:
            raise ValueError(
                f"{self.samples_per_batch} samples a batch do not divide by {self.size} positions; "
                f"set a multiple of {self.size}"
            )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of the samples of each batch."""
        share = self.samples_per_batch // self.size
        begin = self.samples_consumed + self.rank * share
        for _ in itertools.count() if self.num_epochs is None else range(len(self)):
            yield [self._sample_at(position) for position in range(begin, begin + share)]
            begin += self.samples_per_batch

    def __len__(self) -> int:
        """Return how many batches are left; TypeError where there is no end."""
        if self.num_epochs is None:
            raise TypeError("a sampler without num_epochs has no end, so no length")
        rest = self.num_samples * self.num_epochs - self.samples_consumed
        return max(0, rest // self.samples_per_batch)

    def _sample_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_samples)
        if not self.shuffle:
            return index
        return make_permutation(size=self.num_samples, seed=self.seed, epoch=epoch)(index)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or f"a {type(function).__name__}")


def _reference(function: Factory) -> str:
    """Return where another process finds a function; TypeError where it does not."""
    name, module = _name(function), str(getattr(function, "__module__", None))
    remedy = (
        "another process has to import it: write a function at the top of a module, "
        "and give what it needs as functools.partial(function, NAME=VALUE)"
    )
    if "<lambda>" in name:
        raise TypeError(f"a lambda of {module} cannot be a source; {remedy}")
    if "<locals>" in name:
        raise TypeError(f"{module}.{name} is made within another function; {remedy}")
    if "." in name or inspect.ismethod(function) or not hasattr(function, "__qualname__"):
        raise TypeError(f"{module}.{name} is no function of a module; {remedy}")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise TypeError(f"{module}.{name} is not what stands there under this name; {remedy}")
    return f"{_module_reference(module, remedy)}:{name}"


def _module_reference(module: str, remedy: str) -> str:
    """Return a module's name, or for the script that was started what leads to it."""
    if module != "__main__":
        return module
    script = sys.modules["__main__"]
    if script.__spec__ is not None:  # python -m
        return script.__spec__.name
    file = getattr(script, "__file__", None)
    if file is None or not file.endswith(".py"):
        raise TypeError(f"the function was typed in, and stands in no file; {remedy}")
    return str(Path(file).resolve())


def _import_script(path: str) -> ModuleType:
    """Import the script that was started, as multiprocessing does in the children it starts.

    It is `__main__` here too, so that the workers of a DataLoader in their turn find it;
    its `__name__` is another, so that what stands under `if __name__ == "__main__"` does
    not run.
    """
    running = sys.modules["__main__"]
    file = getattr(running, "__file__", None)
    if file is not None and Path(file).resolve() == Path(path):
        return running
    if not Path(path).is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(_SCRIPT_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None  # else a child would look for a module of this name
    sys.modules["__main__"] = sys.modules[_SCRIPT_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules["__main__"] = running
        del sys.modules[_SCRIPT_NAME]
        raise
    return module


def _check_arguments(function: Any, source: Source) -> None:
    """Raise TypeError for arguments that the function does not take, or still needs."""
    if "start" in source.arguments:
        raise TypeError(
            f"{source.reference} is given start={source.arguments['start']!r:.40}; leave it out, "
            "as the producer gives the start of the batches under this name"
        )
    signature = inspect.signature(function)
    given = {"start": None} if "start" in signature.parameters else {}
    try:
        signature.bind(**given, **source.arguments)
    except TypeError as error:
        shown = ", ".join(source.arguments) or "no arguments"
        raise TypeError(
            f"{source.reference}{signature} cannot be called with {shown}: {error}"
        ) from error


def _check_callable(function: Any, source: Source) -> None:
    """Raise ProducerError for what cannot be called with the arguments of a source."""
    if not callable(function):
        raise ProducerError(
            f"{source.reference} is a {type(function).__name__}; want a function "
            "that returns what yields batches"
        )
    try:
        _check_arguments(function, source)
    except TypeError as error:
        raise ProducerError(str(error)) from error


def _check_loader(loader: Any, source: Source) -> Any:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ProducerError(
            f"{source.reference} has returned a {type(loader).__name__}, which yields nothing; "
            "want a DataLoader or anything else that a for loop takes"
        )
    return loader


def _skipping_text(source: Source, number: int) -> str:
    return (
        f"{source.reference} begins at batch 0, so {number} batches are read and thrown away; "
        "to avoid that, give the function a parameter `start` and begin at start.batch "
        "(PositionBatchSampler does for map-style datasets), or return a loader with "
        "state_dict and load_state_dict"
    )

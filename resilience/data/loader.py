"""Batches from the cache: what a worker iterates over in place of its dataloader."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Literal

from resilience.data.errors import CacheFullError, DamagedBatchError, DataCacheError
from resilience.data.failure import parse_failure, rebuild_error
from resilience.data.fingerprint import cache_name, describe, digest
from resilience.data.folder import open_cache, open_root
from resilience.data.json_text import Json
from resilience.data.producer_connection import ProducerConnection
from resilience.data.sealing import open_cache_sealer
from resilience.data.segments import SegmentReader
from resilience.data.sources import Source, digest_code, make_source
from resilience.data.spawn import end_producer
from resilience.data.spec import OwnerProcess, ProducerSpec, read_started
from resilience.data.states import find_state, parse_state, write_state
from resilience.data.store import SegmentStore
from resilience.data.tree import TreeReader
from resilience.events import EventLog
from resilience.settings import MmapSettings

_LINGER_S = 30.0
_TRIES_MAX = 5
"""So often a batch is made again that is damaged each time."""
_READERS_MAX = 256
"""So many forms of batches are remembered."""
_ROOT = Path("/dev/shm")


def cached(
    dataloader_factory: Callable[..., Iterable[Any]] | Source,
    settings: MmapSettings,
    *,
    identity: Mapping[str, Json],
    job: str,
    samples_per_batch: int = 1,
    samples_consumed: int = 0,
    rank: int = 0,
    size: int = 1,
    stage: Literal["train", "val"] = "train",
    owner_pid: int | None = None,
    events: EventLog | None = None,
    on_wait: Callable[[], None] | None = None,
) -> CachedLoader:
    """Return the batches of a dataloader, from a cache that survives this process.

    `dataloader_factory` is called in another process, the producer, which has to import it: a
    function at the top of a module, a functools.partial of one with JSON arguments, or a Source.
    If it has a parameter `start`, it gets a Start there and its batches have to begin where that
    says. `identity` is whatever else the batches depend on, such as dataset, tokenizer and seed:
    where it or the text of the factory's module differs, nothing that is cached is used.
    `samples_per_batch` and `samples_consumed` count the samples of all `size` positions together;
    this is position `rank`. The producer ends with the process `owner_pid`, or without one soon
    after its last consumer. `on_wait` is called some times a second while a batch is waited for,
    and may raise to end the wait.

    Returns at once, whether there is a batch yet or not. Raises TypeError for a factory that no
    other process can import, ValueError for a position within a batch, and CacheFolderError.
    """
    if job in ("", "..") or Path(job).name != job:
        raise ValueError(f"job {job!r} is no name of a folder; give one without '/'")
    source = make_source(dataloader_factory)
    place: dict[str, Any] = {"stage": stage, "rank": rank, "size": size}
    whole: dict[str, Json] = {"given": identity, "code": digest_code(dataloader_factory)}
    text = describe(whole, source=source, samples_per_batch=samples_per_batch, **place)
    if samples_consumed < 0 or samples_consumed % samples_per_batch:
        raise ValueError(
            f"{samples_consumed} samples consumed are no whole number of batches of "
            f"{samples_per_batch} samples; resume where a batch of all positions begins"
        )
    root = Path(settings.folder or _ROOT) / job
    name = cache_name(text, **place)
    spec = ProducerSpec(
        reference=source.reference,
        arguments=source.arguments,
        root=str(root),
        job=job,
        keep_s=settings.keep_s,
        folder=str(root / name),
        fingerprint=digest(text).hex(),
        samples_per_batch=samples_per_batch,
        first=samples_consumed // samples_per_batch,
        **place,
        **_take_limits(settings, stage),
        owner=_find_owner(owner_pid),
        linger_s=_LINGER_S,
        module_path=tuple(sys.path),
    )
    return CachedLoader(spec, text, deadline_s=settings.deadline_s, events=events, on_wait=on_wait)


class _EndOfStage(IndexError):  # noqa: N818  (as StopIteration, it is no error)
    """There are no more batches; told apart from an IndexError of the dataset."""

    def __init__(self, number: int, num_batches: int) -> None:
        super().__init__(f"batch {number} does not exist: the stage has {num_batches}")
        self.num_batches = num_batches


class CachedLoader(AbstractContextManager["CachedLoader"]):
    """The batches of one position and stage; made by `cached`. One thread; a context manager.

    A batch is made of views of mapped memory. No other process's writing changes them, and no other
    process sees what is written to them. The views stay valid after `close`.
    """

    def __init__(
        self,
        spec: ProducerSpec,
        description: str,
        *,
        deadline_s: float,
        events: EventLog | None,
        on_wait: Callable[[], None] | None,
    ) -> None:
        self._spec = spec
        self._events = events
        self._next = spec.first
        self._num_before = 0
        """Batches of the whole epochs before this one."""
        # The producer hears of a position after so many batches, while the others are there yet.
        self._tell_every = max(1, spec.prefetch_length // 2)
        self._told = -self._tell_every
        self._is_closed = False
        self._readers: dict[bytes, TreeReader] = {}
        self._lease = open_root(Path(spec.root), spec.job, spec.keep_s)
        try:
            folder = open_cache(self._lease, Path(spec.folder).name, description)
            self._store = SegmentStore(
                folder,
                bytes.fromhex(spec.fingerprint),
                sealer=open_cache_sealer(spec, is_producer=False),
            )
            self._store.refresh()
            self._segment: SegmentReader | None = self._store.find(self._next)
            self._connection = ProducerConnection(
                spec, deadline_s=deadline_s, on_wait=on_wait, on_late=self._tell_late
            )
            with suppress(DataCacheError):  # who waits for a batch hears why there is no producer
                self._connection.open(self._next)
        except BaseException:
            self._lease.close()
            raise
        # For a loader that nobody closes.
        weakref.finalize(self, self._lease.close)

    @property
    def samples_consumed(self) -> int:
        """Return how many samples, of all positions, stand before the next batch."""
        return (self._num_before + self._next) * self._spec.samples_per_batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the position to the end of the stage; validation from 0 on.

        A position at the end of the stage, or behind it, is one of a further epoch, which has the
        same batches. Raises DataCacheError where the stage has no batches, or where a position
        behind its end cannot be placed.
        """
        if self._spec.stage == "val":
            self._next = 0
            self._tell(0)
        is_first = True
        while True:
            try:
                batch = self.read(self._next)
            except _EndOfStage as end:
                if not is_first or self._spec.stage == "val":
                    return
                self._begin_epoch(end.num_batches)
                batch = self.read(self._next)
            is_first = False
            yield batch

    def _begin_epoch(self, num_batches: int) -> None:
        """Turn a position behind the stage's end into one of a further epoch."""
        position = self._next
        if num_batches == 0:
            raise DataCacheError("the stage has no batches; look at the dataset and its filters")
        try:
            # A source that is told where to begin does not know how many batches lie before.
            self.read(num_batches - 1)
        except _EndOfStage as end:
            raise DataCacheError(
                f"the position {position} is behind the stage's end, and where in an epoch it lies "
                "cannot be known; resume from an earlier checkpoint, or use a source that begins "
                "at the first batch"
            ) from end
        epochs, self._next = divmod(position, num_batches)
        self._num_before += epochs * num_batches
        self._tell(self._next)

    def read(self, number: int) -> Any:
        """Return a batch by its number, and go on behind it; waits for it until the deadline.

        Raises IndexError behind the stage's last batch, what the dataset has raised at this
        batch, LateBatchError after the deadline, and ProducerError where none can be started.
        """
        found = None
        if self._segment is not None:
            # Almost every batch lies where the one before it did; `_find` says what is wrong.
            with suppress(KeyError, DamagedBatchError):
                found = self._segment.read(number)
        description, payload = found or self._find(number)
        reader = self._readers.get(description)
        if reader is None:
            reader = self._add_reader(description)
        batch = reader.build(payload)
        self._next = number + 1
        if not 0 <= number - self._told < self._tell_every:
            self._tell(number)
        return batch

    def is_ready(self, number: int) -> bool:
        """Return whether `read` of a batch waits for nobody; else the producer hears of it."""
        # The store closes those that are deleted, perhaps this one.
        self._segment = None
        if self._find_segment(number, is_damaged=False) is not None:
            return True
        self._tell(number)
        return False

    def count_ready(self) -> int:
        """Return how many batches, from the next one on, are in the cache now."""
        # The store closes those that are deleted, perhaps this one.
        self._segment = None
        self._store.refresh()
        number = self._next
        while segment := self._store.find(number):
            number = segment.numbers.stop
        return number - self._next

    def note_checkpoint(self, number: int) -> None:
        """Tell the producer that a resume from the newest complete checkpoint begins at this batch.

        Batches before it may then go from the cache.
        """
        self._connection.note_checkpoint(number)

    def explain(self) -> str:
        """Return what the producer does now, for a person; a busy one takes a second to say."""
        self._check_open()
        return self._connection.explain(self._next)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for `load_state_dict` of a loader of any number of positions."""
        state = find_state(self._store.folder, self._next)
        content = None
        if state is not None:
            fingerprint = self._spec.fingerprint
            content = {"batch": state.batch, "state": state.state, "fingerprint": fingerprint}
        return {"samples_consumed": self.samples_consumed, "source_state": content}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to another loader's position; ValueError where no batch begins there.

        Where the position is known earlier, `samples_consumed` of `cached` is faster: until this
        call the producer makes the batches of the position that was given there.
        """
        consumed = int(state["samples_consumed"])
        number, rest = divmod(consumed, self._spec.samples_per_batch)
        if rest or number < 0:
            raise ValueError(
                f"{consumed} samples consumed are no whole number of batches of "
                f"{self._spec.samples_per_batch} samples"
            )
        content = state.get("source_state")
        # A source's state of another position, or another recipe, would lead to its batches.
        if content is not None and content.get("fingerprint") == self._spec.fingerprint:
            with suppress(OSError):  # on a full file system; it only saves the producer time
                write_state(self._store.folder, parse_state(content))
        self._next, self._num_before = number, 0
        self._tell(number)

    def close(self, *, is_over: bool = False) -> None:
        """Leave the cache; the files stay, and the producer goes on for the next consumer.

        `is_over` says that no other consumer comes: the producer ends with its last consumer, and
        the files of the job go with the last of all its loaders on the node. A second call does
        nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.close("over" if is_over else "bye", self._next)
        self._segment = None
        self._store.close()
        if is_over:
            self._lease.end(end_producer=end_producer)
        else:
            self._lease.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _find(self, number: int) -> tuple[bytes, memoryview]:
        """Return a batch that is not in the segment of the one before, or is damaged there."""
        self._check_open()
        if number < 0:
            raise ValueError(f"there is no batch {number}; the first is 0")
        # The store closes those that are deleted, perhaps this one.
        self._segment = None
        is_damaged = False
        for tries in range(_TRIES_MAX):
            segment = self._find_segment(number, is_damaged=is_damaged)
            if segment is not None:
                try:
                    found = segment.read(number)
                except DamagedBatchError as error:
                    is_damaged = True
                    if self._events is not None:
                        self._events.write("batch_damaged", step=number, reason=str(error))
                else:
                    self._segment = segment
                    return found
            # If it is not there again, somebody has removed what the producer takes for stored.
            self._wait_for(number, is_damaged=is_damaged or tries > 0)
        raise DamagedBatchError(
            f"batch {number} was damaged {_TRIES_MAX} times in a row; the memory or the disk of "
            f"{self._spec.folder} is bad"
        )

    def _find_segment(self, number: int, *, is_damaged: bool) -> SegmentReader | None:
        """Return where a batch lies; the folder is listed only where that is not known yet."""
        segment = None if is_damaged else self._store.find(number)
        if segment is None:
            self._store.refresh()
            segment = self._store.find(number)
        return segment

    def _wait_for(self, number: int, *, is_damaged: bool) -> None:
        """Wait until a batch is published, or raise why it will not be."""
        self._told = number
        answer = self._connection.ask(number, is_damaged=is_damaged)
        if answer.verb == "failed" and self._frees_memory(answer.text):
            answer = self._connection.ask(number, is_damaged=is_damaged)
        if answer.verb == "end":
            raise _EndOfStage(number, answer.number)
        if answer.verb == "failed":
            raise rebuild_error(parse_failure(answer.text), number=number)

    def _frees_memory(self, failure: str) -> bool:
        """Let go of deleted segments where the producer finds no room: they still take it."""
        if parse_failure(failure).name != CacheFullError.__name__:
            return False
        self._segment = None
        self._store.close()
        return True

    def _tell(self, number: int) -> None:
        """Tell the producer the position; without one, the next wait for a batch raises why."""
        self._check_open()
        self._told = number
        with suppress(DataCacheError):
            if self._connection.open(number):
                self._connection.tell("at", number)

    def _tell_late(self, number: int, text: str) -> None:
        text = f"batch {number} of position {self._spec.rank} has not come yet: {text}"
        sys.stderr.write(f"{text}\n")
        if self._events is not None:
            self._events.write("batch_late", step=number, text=text)

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataCacheError("the loader is closed")

    def _add_reader(self, description: bytes) -> TreeReader:
        if len(self._readers) >= _READERS_MAX:
            self._readers.clear()
        reader = TreeReader(description)
        self._readers[description] = reader
        return reader


def _take_limits(settings: MmapSettings, stage: str) -> dict[str, Any]:
    """Return what of the settings a producer of this stage has to know."""
    is_validation = stage == "val"
    return {
        "prefetch_length": (
            settings.val_prefetch_length if is_validation else settings.prefetch_length
        ),
        "lookback_length": (
            settings.val_lookback_length if is_validation else settings.lookback_length
        ),
        "checkpoint_frequency": settings.checkpoint_frequency,
        "budget_bytes": settings.budget_mib << 20,
        "encryption": settings.encryption.model_dump() if settings.encryption else None,
    }


def _find_owner(pid: int | None) -> OwnerProcess | None:
    if pid is None:
        return None
    started = read_started(pid)
    if started is None:
        raise ValueError(f"there is no process {pid} to be the producer's owner")
    return OwnerProcess(pid=pid, started=started)

"""A process group of threads that behaves as one of an accelerator does.

Each rank has a queue, which its own thread works off in order, as a device does with a
stream: collectives and enqueued local work alike. Issuing returns at once, and so does
`wait`; a buffer is read and written when its turn comes, not when it is handed over.
Abort makes the collective at the head, and those behind it, end over garbage; the queue
then runs on, local work included. So what goes wrong on NCCL and never on gloo goes
wrong in a test.

What an aborted collective leaves is drawn from the world's seed, the rank and the number
of the collective, never from time.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Garbage = Literal["random", "stale", "untouched"]
"""What an aborted collective leaves in its output: random bytes, what the rank's last whole
collective of that shape left, or what was there."""


@dataclass
class _Meeting:
    """One collective, or one message, on its way."""

    kind: str
    num_members: int
    inputs: dict[int, Tensor | None] = field(default_factory=dict)
    is_whole: bool = False
    """All have come; whoever is aborted from now on takes nothing from the others."""


@dataclass(frozen=True, slots=True)
class _Issued:
    """A collective in the queue of one rank."""

    key: tuple[object, ...]
    kind: str
    num_members: int
    source: Tensor | None
    outputs: Sequence[Tensor]
    finish: Callable[[dict[int, Tensor | None]], Sequence[Tensor]]


class AsyncWorld:
    """What the ranks of one generation share; used as a context that ends their queues.

    An aborted rank's part in a collective that others still wait for is either lost with
    it or was sent before, by the seed: both happen.
    """

    def __init__(self, world_size: int, *, seed: int = 0, garbage: Garbage = "random") -> None:
        self.world_size = world_size
        self.seed = seed
        self.garbage = garbage
        self.meetings: dict[tuple[object, ...], _Meeting] = {}
        self.changed = threading.Condition()
        self.groups = tuple(AsyncGroup(self, rank) for rank in range(world_size))

    def __enter__(self) -> AsyncWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self.groups:
            group.abort()
        for group in self.groups:
            group.close()


class AsyncWork:
    """What issuing a collective returns."""

    def wait(self) -> None:
        """Return at once: only what is enqueued afterwards waits."""


class AsyncGroup:
    """One rank's view of its world. Issues from one thread; abort comes from any."""

    def __init__(self, world: AsyncWorld, rank: int) -> None:
        self.rank = rank
        self._world = world
        self._aborted = threading.Event()
        self._waits_in: _Meeting | None = None
        self._num_queued = 0
        self._counts: dict[object, int] = {}
        self._whole: dict[object, Tensor] = {}
        self._error: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work_off, name=f"stream-{rank}", daemon=True)
        self._thread.start()

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.world_size

    def all_reduce(self, tensor: Tensor, out: Tensor | None = None) -> AsyncWork:
        """Sum over all ranks, in the order of ranks, into `out`, or in place."""
        output = tensor if out is None else out
        return self._issue("all_reduce", tensor, [output], lambda inputs: [_sum(inputs)])

    def broadcast(self, tensor: Tensor, src: int) -> AsyncWork:
        """Replace `tensor` by that of rank `src`."""
        outputs = [] if self.rank == src else [tensor]
        return self._issue("broadcast", tensor, outputs, lambda inputs: [_get(inputs, src)])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> AsyncWork:
        """Fill `outputs` with the tensors of all ranks."""
        ranks = range(self.world_size)
        return self._issue(
            "all_gather", tensor, outputs, lambda inputs: [_get(inputs, each) for each in ranks]
        )

    def barrier(self) -> AsyncWork:
        """Hold this rank's queue until all have got there; the host goes on."""
        return self._issue("barrier", None, [], lambda _: [])

    def send(self, tensor: Tensor, dst: int) -> AsyncWork:
        """Send to a rank that receives."""
        return self._issue_message(self.rank, dst, tensor, [])

    def recv(self, tensor: Tensor, src: int) -> AsyncWork:
        """Receive from a rank that sends."""
        return self._issue_message(src, self.rank, None, [tensor])

    def enqueue(self, work: Callable[[], object]) -> None:
        """Have local work done in its turn, whatever has become of what it works on."""
        with self._world.changed:
            self._num_queued += 1
        self._queue.put(work)

    def settle(self, timeout_s: float) -> bool:
        """Block until the queue waits for other ranks, or is empty; say whether it waits.

        How a test gets to a certain place without a sleep. What comes of it stands while
        nobody else does anything.
        """
        self._wait_until(lambda: self._is_waiting() or self._num_queued == 0, timeout_s)
        return self._is_waiting()

    def wait_until_waiting(self, timeout_s: float) -> None:
        """Block until the queue waits for other ranks, whoever has yet to issue that."""
        self._wait_until(self._is_waiting, timeout_s)

    def _wait_until(self, claim: Callable[[], bool], timeout_s: float) -> None:
        with self._world.changed:
            if not self._world.changed.wait_for(claim, timeout_s):
                raise TimeoutError(f"rank {self.rank}'s queue is elsewhere after {timeout_s} s")

    def synchronize(self, timeout_s: float) -> None:
        """Block until all that is queued by now is done.

        Raises TimeoutError, or RuntimeError from what was raised in the queue, once. That
        a collective was aborted is no error here.
        """
        is_done = threading.Event()
        self.enqueue(is_done.set)
        if not is_done.wait(timeout_s):
            raise TimeoutError(f"rank {self.rank}'s queue is not done after {timeout_s} s")
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"rank {self.rank}'s queue: {error}") from error

    def abort(self) -> None:
        """End this rank's collectives, now and later ones, over garbage; the queue runs on."""
        with self._world.changed:
            self._aborted.set()
            self._world.changed.notify_all()

    def close(self) -> None:
        """End the queue's thread once all that is queued is done."""
        self._queue.put(None)
        self._thread.join()

    def _issue(
        self,
        kind: str,
        source: Tensor | None,
        outputs: Sequence[Tensor],
        finish: Callable[[dict[int, Tensor | None]], Sequence[Tensor]],
    ) -> AsyncWork:
        key = ("all", self._count("all"))
        return self._put(_Issued(key, kind, self.world_size, source, outputs, finish))

    def _issue_message(
        self, src: int, dst: int, source: Tensor | None, outputs: Sequence[Tensor]
    ) -> AsyncWork:
        key = (src, dst, self._count((src, dst)))
        return self._put(
            _Issued(key, "message", 2, source, outputs, lambda inputs: [_get(inputs, src)])
        )

    def _count(self, among: object) -> int:
        self._counts[among] = self._counts.get(among, -1) + 1
        return self._counts[among]

    def _put(self, issued: _Issued) -> AsyncWork:
        self.enqueue(lambda: self._take_part(issued))
        return AsyncWork()

    def _work_off(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a stream has nobody to raise to
                self._error = self._error or error
            with self._world.changed:
                self._num_queued -= 1
                self._world.changed.notify_all()

    def _take_part(self, issued: _Issued) -> None:
        inputs = self._meet(issued)
        if inputs is None:
            self._fill_garbage(issued)
            return
        for output, result in zip(issued.outputs, issued.finish(inputs), strict=False):
            output.copy_(result)
            self._whole[_shape(output)] = output.clone()

    def _meet(self, issued: _Issued) -> dict[int, Tensor | None] | None:
        """Return what all put in, or None where this rank's part was aborted."""
        world = self._world
        with world.changed:
            if self._aborted.is_set():
                return None
            meeting = world.meetings.setdefault(
                issued.key, _Meeting(issued.kind, issued.num_members)
            )
            if meeting.kind != issued.kind:
                raise ValueError(f"{issued.kind} meets {meeting.kind} of another rank")
            source = issued.source
            meeting.inputs[self.rank] = None if source is None else source.clone()
            if len(meeting.inputs) == meeting.num_members:
                meeting.is_whole = True
            self._wait_for(meeting)
            if not self._aborted.is_set():
                return meeting.inputs
            if not meeting.is_whole and self._draw(issued).random() < 0.5:
                del meeting.inputs[self.rank]
            return None

    def _wait_for(self, meeting: _Meeting) -> None:
        self._waits_in = meeting
        self._world.changed.notify_all()
        self._world.changed.wait_for(lambda: not self._is_waiting())
        self._waits_in = None

    def _is_waiting(self) -> bool:
        meeting = self._waits_in
        return meeting is not None and not meeting.is_whole and not self._aborted.is_set()

    def _fill_garbage(self, issued: _Issued) -> None:
        if self._world.garbage == "untouched":
            return
        generator = torch.Generator().manual_seed(self._draw(issued).getrandbits(63))
        for output in issued.outputs:
            stale = self._whole.get(_shape(output))
            if self._world.garbage == "stale" and stale is not None:
                output.copy_(stale)
            else:
                _fill_random(output, generator)

    def _draw(self, issued: _Issued) -> random.Random:
        return random.Random(f"{self._world.seed}/{self.rank}/{issued.key}")


class AsyncChannel:
    """The gate over an asynchronous group."""

    def __init__(self, group: AsyncGroup, *, timeout_s: float = 60.0) -> None:
        self._group = group
        self._timeout_s = timeout_s

    def reduce(self, buffer: Tensor) -> None:
        """Sum in the queue, and block until the queue is through."""
        self._group.all_reduce(buffer).wait()
        self._group.synchronize(self._timeout_s)

    def abort(self) -> None:
        """Abort the group."""
        self._group.abort()


def _sum(inputs: dict[int, Tensor | None]) -> Tensor:
    total = _get(inputs, 0).clone()
    for rank in range(1, len(inputs)):
        total += _get(inputs, rank)
    return total


def _get(inputs: dict[int, Tensor | None], rank: int) -> Tensor:
    tensor = inputs[rank]
    assert tensor is not None
    return tensor


def _shape(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.dtype, *tensor.shape)


def _fill_random(tensor: Tensor, generator: torch.Generator) -> None:
    num_bytes = tensor.numel() * tensor.element_size()
    high = 2 if tensor.dtype is torch.bool else 256
    noise = torch.randint(high, (num_bytes,), dtype=torch.uint8, generator=generator)
    tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))

"""Messages between threads that play ranks, as a process group for CPU tensors has them.

Beside `AsyncGroup` of resilience.testing, whose one queue would hold a message up behind another. A
buffer is read, and the other one written, at the moment when both sides have asked for
it, not when it is handed over. Nothing that one rank does wakes another: who waits for
a rank that is gone waits until it is aborted itself. Abort leaves garbage in what was
not received yet, and is seen by `wait` alone.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

_TIMEOUT_S = 60.0


class MessageWorld:
    """What the ranks of one generation share."""

    def __init__(self, world_size: int, *, seed: int = 0) -> None:
        self.seed = seed
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int, int], deque[MessageWork]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[MessageWork]] = defaultdict(deque)
        self.groups = tuple(AsyncMessages(self, rank) for rank in range(world_size))


class MessageWork:
    """One side of a message on its way."""

    def __init__(self, world: MessageWorld, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_done = False
        self.is_aborted = False
        self._world = world

    def finish(self) -> None:
        """Note that the message has arrived; the caller has the world's lock."""
        self.is_done = True

    def abort(self) -> None:
        """Note that the message never arrives; the caller has the world's lock."""
        self.is_aborted = True

    def wait(self) -> None:
        """Block until both sides have asked for it.

        Raises RuntimeError where this side was aborted before, or after a minute.
        """
        with self._world.changed:
            is_over = self._world.changed.wait_for(
                lambda: self.is_done or self.is_aborted, _TIMEOUT_S
            )
        if self.is_aborted:
            raise RuntimeError("the group was aborted")
        if not is_over:
            raise RuntimeError(f"no peer after {_TIMEOUT_S} s")


class AsyncMessages:
    """One rank's end; `send` and `recv` are those of torch's ProcessGroup."""

    def __init__(self, world: MessageWorld, rank: int) -> None:
        self.rank = rank
        self._world = world
        self._is_aborted = False
        self._open: list[tuple[MessageWork, bool]] = []

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MessageWork:
        """Begin to send one tensor, which is left alone until the work is waited for."""
        return self._issue(tensors[0], (self.rank, peer, tag), is_sent=True)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> MessageWork:
        """Begin to receive one tensor."""
        return self._issue(tensors[0], (peer, self.rank, tag), is_sent=False)

    def abort(self) -> None:
        """End this rank's messages, now and later ones, over garbage; from any thread."""
        with self._world.changed:
            self._is_aborted = True
            for work, is_sent in self._open:
                self._end(work, is_sent=is_sent)
            self._open.clear()
            self._world.changed.notify_all()

    def _issue(self, tensor: Tensor, key: tuple[int, int, int], *, is_sent: bool) -> MessageWork:
        world = self._world
        work = MessageWork(world, tensor)
        own, other = (world.sends, world.receives) if is_sent else (world.receives, world.sends)
        with world.changed:
            if self._is_aborted:
                self._end(work, is_sent=is_sent)
                return work
            while other[key] and other[key][0].is_aborted:
                other[key].popleft()
            if not other[key]:
                own[key].append(work)
                self._open.append((work, is_sent))
                return work
            peer = other[key].popleft()
            source, target = (work, peer) if is_sent else (peer, work)
            target.tensor.copy_(source.tensor)
            source.finish()
            target.finish()
            world.changed.notify_all()
        return work

    def _end(self, work: MessageWork, *, is_sent: bool) -> None:
        if work.is_done:
            return
        work.abort()
        if not is_sent:
            noise = random.Random(f"{self._world.seed}/{self.rank}").randbytes(work.tensor.nbytes)
            flat = work.tensor.view(-1).view(torch.uint8)
            flat.copy_(torch.frombuffer(bytearray(noise), dtype=torch.uint8))

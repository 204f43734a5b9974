"""The workers of one generation, and what they agree on through their store.

Every key stands in the generation's own store, or under its name: a replaced worker never
reads what one of an older generation has written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from recipes_training.errors import GroupError, PlacementError, describe, first_line
from resilience.state.layout import Layout

DATA_TIMEOUT = timedelta(hours=12)
"""How long one worker may tokenise while the others wait."""
CHECKPOINT_TIMEOUT = timedelta(hours=1)
"""How long rank 0 may write one file of the checkpoint."""

_FINE = "fine"
_PAUSE_S_MIN = 0.005
_PAUSE_S_MAX = 1.0

_kept: list[object] = []


def keep(holder: object) -> None:
    """Keep what refers to a process group until the process ends.

    To destruct a group joins its threads with the interpreter's lock held, and one of them
    may be waiting for that lock (seen with gloo and DDP on torch 2.13, where a run ends right
    after a reduction).
    """
    _kept.append(holder)


def go_on() -> None:
    """Do nothing: the check of a group that nobody breaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """All workers of this generation; the default process group is theirs."""

    rank: int
    layout: Layout
    generation: int
    node: str
    """Name of this worker's node."""
    device: torch.device
    store: Store
    check: Callable[[], None] = go_on
    """Raises where the generation is over: called while a worker waits by the store."""

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.layout.world_size

    @property
    def local_rank(self) -> int:
        """Return this worker's number on its node."""
        return self.layout.seat(self.rank).local_rank

    @contextmanager
    def lead(self, topic: str) -> Iterator[None]:
        """Tell those who `follow` the topic how the block ended, also where it failed."""
        with self._tell_problem(topic):
            yield
        self.store.set(topic, _FINE)

    def follow(self, topic: str, timeout: timedelta) -> None:
        """Wait for the one who leads the topic; raises GroupError with the problem told."""
        if (told := wait_for_key(self.store, topic, timeout, self.check)) != _FINE:
            raise GroupError(told)

    def first_text(self, topic: str, text: str, timeout: timedelta) -> str:
        """Return rank 0's text."""
        if self.rank == 0:
            self.store.set(topic, text)
            return text
        return wait_for_key(self.store, topic, timeout, self.check)

    @contextmanager
    def meet(self, topic: str, timeout: timedelta) -> Iterator[None]:
        """Return when all workers have ended the block, or one has failed in it.

        Costs no collective.
        """
        topic = f"{topic}/all"
        with self._tell_problem(topic):
            yield
        if self.store.add(f"{topic}/count", 1) == self.world_size:
            self.store.set(topic, _FINE)
        self.follow(topic, timeout)

    def first_problem(self, topic: str, problem: str | None, timeout: timedelta) -> str | None:
        """Return on every worker one of the problems that workers have, None where none has any."""
        topic = f"{topic}/problem"
        if problem is not None:
            self.store.set(f"{topic}/text", problem)
        if self.store.add(f"{topic}/count", 1) == self.world_size:
            self.store.set(topic, _FINE)
        wait_for_key(self.store, topic, timeout, self.check)
        told = f"{topic}/text"
        return self.store.get(told).decode() if self.store.check([told]) else None

    def told_by_all(self, topic: str, text: str, timeout: timedelta) -> dict[int, str]:
        """Return on every worker what each rank has told."""
        topic = f"{topic}/told"
        self.store.set(f"{topic}/{self.rank}", text)
        self.first_problem(topic, None, timeout)  # all have told
        found = {}
        if self.rank == 0:
            ranks = range(self.world_size)
            found = {rank: self.store.get(f"{topic}/{rank}").decode() for rank in ranks}
        told = json.loads(self.first_text(f"{topic}/all", json.dumps(found), timeout))
        return {int(rank): each for rank, each in told.items()}

    def lowest_text(self, topic: str, text: str | None, timeout: timedelta) -> str | None:
        """Return on every worker the text of the lowest rank that has one; None where none has."""
        topic = f"{topic}/lowest"
        if text is not None:
            self.store.set(f"{topic}/{self.rank}", text)
        self.first_problem(topic, None, timeout)  # all have told
        found = None
        if self.rank == 0:
            ranks = range(self.world_size)
            found = next((each for each in ranks if self.store.check([f"{topic}/{each}"])), None)
        told = self.first_text(f"{topic}/rank", str(found), timeout)
        return None if told == "None" else self.store.get(f"{topic}/{told}").decode()

    @contextmanager
    def _tell_problem(self, topic: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.store.set(topic, describe(error))
            raise


def open_device(device_type: str, local_rank: int) -> torch.device:
    """Return this worker's device; raises PlacementError where there is none."""
    if device_type == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise PlacementError(
            f"local rank {local_rank} has no GPU, this node has {torch.cuda.device_count()}; "
            "set trainer.num_devices and instance to what the node has"
        )
    choose_fixed_order()
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def choose_fixed_order() -> None:
    """Take the kernels whose sums have one order; before the first of them.

    torch refuses a call that knows no such kernel. With `warn_only` it would take the backward
    pass of its fused attention as it comes, whose sums have no order, a kernel that has one or not.
    """
    # cuBLAS reads this when its first handle is made; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    # Nothing here reads memory before it is written, and to fill it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def wait_for_key(store: Store, key: str, timeout: timedelta, check: Callable[[], None]) -> str:
    """Return the key's text when the store has it; raises GroupError after the timeout.

    `check` is called before each look, and raises where nobody will set the key any more.
    """

    def has_key() -> bool:
        check()
        return bool(store.check([key]))

    if not poll(has_key, timeout):
        raise GroupError(f"no word of {key!r} from the other workers within {timeout}")
    return store.get(key).decode()


def poll(is_done: Callable[[], bool], timeout: timedelta) -> bool:
    """Return whether it is done within the timeout; raises GroupError where the store is gone.

    It polls: within one call of the store Python takes no signal, and a call that times out
    writes warnings to the log.
    """
    deadline_s, pause_s = time.monotonic() + timeout.total_seconds(), _PAUSE_S_MIN
    try:
        while not is_done():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
    except dist.DistError as error:
        raise GroupError(f"the store of the workers is gone: {first_line(error)}") from error
    return True

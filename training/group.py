"""The workers of one generation: their store and process group.

Every key stands under a name of this start of the workers. The agent keeps one
store over restarts, and without the name a restarted worker reads addresses of
processes that are gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from training.environment import WorkerEnvironment
from training.errors import GroupError, PlacementError, describe
from training.meeting import agree_on_name, wait_for_key

JOIN_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
DATA_TIMEOUT = timedelta(hours=12)
"""How long one worker may tokenise while the others wait."""
CHECKPOINT_TIMEOUT = timedelta(hours=1)
"""How long rank 0 may write one file of the checkpoint."""

_FINE = "fine"

# What holds process groups: kept until the process ends. To destruct a group joins its threads
# with the interpreter's lock held, and one of them may be waiting for that lock (seen with gloo
# and DDP on torch 2.13, where a run ends right after a reduction).
_kept: list[object] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """All workers of this generation; the default process group is theirs."""

    environment: WorkerEnvironment
    node: str
    device: torch.device
    store: Store
    check: Callable[[], None] | None = None
    """Raises where the group is over: called while a worker waits by the store."""

    def keep(self, holder: object) -> None:
        """Keep what refers to the process group until the process ends."""
        _kept.append(holder)

    @contextmanager
    def lead(self, topic: str) -> Iterator[None]:
        """Tell those who `follow` the topic how the block ended, also where it failed."""
        with self._tell_problem(topic):
            yield
        self.store.set(topic, _FINE)

    def follow(self, topic: str, timeout: timedelta) -> None:
        """Wait for the one who leads the topic; raises GroupError with the problem told."""
        wait_for_key(self.store, topic, timeout, self.check)
        if (told := self.store.get(topic).decode()) != _FINE:
            raise GroupError(told)

    def first_text(self, topic: str, text: str, timeout: timedelta) -> str:
        """Return rank 0's text."""
        if self.environment.rank == 0:
            self.store.set(topic, text)
            return text
        wait_for_key(self.store, topic, timeout, self.check)
        return self.store.get(topic).decode()

    @contextmanager
    def meet(self, topic: str, timeout: timedelta) -> Iterator[None]:
        """Return when all workers have ended the block, or one has failed in it.

        Costs no collective.
        """
        topic = f"{topic}/all"
        with self._tell_problem(topic):
            yield
        if self.store.add(f"{topic}/count", 1) == self.environment.world_size:
            self.store.set(topic, _FINE)
        self.follow(topic, timeout)

    def first_problem(self, topic: str, problem: str | None, timeout: timedelta) -> str | None:
        """Return on every worker one of the problems that workers have, None where none has any."""
        topic = f"{topic}/problem"
        if problem is not None:
            self.store.set(f"{topic}/text", problem)
        if self.store.add(f"{topic}/count", 1) == self.environment.world_size:
            self.store.set(topic, _FINE)
        wait_for_key(self.store, topic, timeout, self.check)
        told = f"{topic}/text"
        return self.store.get(told).decode() if self.store.check([told]) else None

    def lowest_text(self, topic: str, text: str | None, timeout: timedelta) -> str | None:
        """Return on every worker the text of the lowest rank that has one; None where none has."""
        topic = f"{topic}/lowest"
        if text is not None:
            self.store.set(f"{topic}/{self.environment.rank}", text)
        self.first_problem(topic, None, timeout)  # all have told
        found = None
        if self.environment.rank == 0:
            ranks = range(self.environment.world_size)
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

    def leave(self) -> None:
        """Use the store no more; the worker that hosts it returns after all others."""
        environment = self.environment
        if environment.is_store_hosted or environment.world_size == 1:
            return
        if environment.rank == 0:
            wait_for_key(self.store, "left/all", COLLECTIVE_TIMEOUT)
        elif self.store.add("left/count", 1) == environment.world_size - 1:
            self.store.set("left/all", _FINE)


@contextmanager
def open_group(
    environment: WorkerEnvironment, *, node: str, device_type: str
) -> Iterator[WorkerGroup]:
    """Form the process group; it is left open where the block ends with an error.

    To destroy a group whose peers may be gone can block; the process that ends
    next does it better.
    """
    device = open_device(device_type, environment.local_rank)
    store = _connect(environment)
    name = agree_on_name(
        store, rank=environment.rank, world_size=environment.world_size, timeout=JOIN_TIMEOUT
    )
    store = PrefixStore(name, store)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device_type == "cuda" else None,
        )
    except dist.DistError as error:
        raise GroupError(f"the {environment.world_size} workers did not meet: {error}") from error
    group = WorkerGroup(environment=environment, node=node, device=device, store=store)
    group.keep(dist.group.WORLD)
    yield group
    dist.destroy_process_group()
    group.leave()


def _connect(environment: WorkerEnvironment) -> Store:
    place = f"{environment.master_addr}:{environment.master_port}"
    try:
        store: Store = TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=environment.rank == 0 and not environment.is_store_hosted,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise GroupError(f"no store at {place}: {error}") from error
    return store


def open_device(device_type: str, local_rank: int) -> torch.device:
    """Return this worker's device; raises PlacementError where there is none."""
    if device_type == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise PlacementError(
            f"local rank {local_rank} has no GPU, this node has {torch.cuda.device_count()}; "
            "set trainer.num_devices and instance to what the node has"
        )
    # cuBLAS reads this when its first handle is made; without it sums have no fixed order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device

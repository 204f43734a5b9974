"""A worker's one generation where somebody else starts the workers.

That is torchrun, a program that sets its variables as HyperPod's hyperpodrun does, our own
node agent for a job without recovery, or nobody at all: then one process is the whole
world. The generation ends with the process, at its first fault; whoever started the
worker may start it again. SIGUSR1 asks an elastic run to leave its generation, so that it can
be started at another size.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from launcher.job import TrainingJob
from recipes_training.environment import WorkerEnvironment
from recipes_training.errors import GroupError
from recipes_training.group import go_on, keep, open_device, poll, wait_for_key
from recipes_training.plan import check_world_size, plan_device_type, plan_layout
from recipes_training.stop import LeaveSignal
from resilience.comm.page import Activity
from resilience.inprocess.plain import own_store
from resilience.state.layout import Layout

JOIN_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


class Members(Protocol):
    """What the loop asks of a generation."""

    @property
    def number(self) -> int:
        """Return the generation's number."""

    @property
    def rank(self) -> int:
        """Return this worker's rank."""

    @property
    def layout(self) -> Layout:
        """Return who holds what."""

    @property
    def store(self) -> Store:
        """Return the generation's own store."""

    @property
    def is_last(self) -> bool:
        """Return whether the run gives up, and the generation is for saving the state alone."""

    @property
    def is_passing(self) -> bool:
        """Return whether all ranks leave the generation as soon as they have one state."""

    def is_to_be_left(self) -> bool:
        """Return whether this rank was told to ask all others to leave after a step."""

    def check(self) -> None:
        """Raise BrokenError where the generation is over; cheap."""

    def mark(self, activity: Activity, step: int, micro_batch: int = 0) -> None:
        """Show what the training thread does; raises BrokenError as `check` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlyGeneration:
    """A generation that nobody breaks and nobody watches."""

    number: int
    rank: int
    layout: Layout
    store: Store
    is_last: bool = False
    is_passing: bool = False
    leave: LeaveSignal = field(default_factory=LeaveSignal)

    def is_to_be_left(self) -> bool:
        """Return whether this worker was asked to leave; the next start has another generation."""
        return self.leave.is_requested

    def check(self) -> None:
        """Return: the process ends with its generation."""

    def mark(self, activity: Activity, step: int, micro_batch: int = 0) -> None:
        """Show nobody what the training thread does."""


@contextmanager
def open_generation(job: TrainingJob, environment: WorkerEnvironment) -> Iterator[OnlyGeneration]:
    """Open the one generation that the environment's variables tell of.

    The process group is left open where the block ends with an error: to destroy a group whose
    peers may be gone can block; the process that ends next does it better. Raises
    PlacementError for a world that the job does not have, and GroupError where the workers do
    not meet.
    """
    check_world_size(job, environment.world_size)
    layout = plan_layout(job, environment)
    device_type = plan_device_type(job)
    device = open_device(device_type, environment.local_rank)
    base = _connect(environment)
    name = agree_on_name(
        base, rank=environment.rank, world_size=environment.world_size, timeout=JOIN_TIMEOUT
    )
    store = PrefixStore(name, base)
    leave = LeaveSignal()
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
    keep(dist.group.WORLD)
    if job.resilience.elastic:
        # Until now there was nothing to save, and the signal ended the worker wherever it was.
        leave.install()
    yield OnlyGeneration(
        number=environment.generation,
        rank=environment.rank,
        layout=layout,
        store=store,
        leave=leave,
    )
    dist.destroy_process_group()
    _leave(environment, store)


def agree_on_name(store: Store, *, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that the workers of this start have in common, and no others.

    torchrun's agents keep one store over restarts, and each counts only the restarts that its
    own workers caused: no variable names this start of all workers. So a worker asks with a
    word drawn afresh, and rank 0 answers under that word. Rank 0 answers dead workers as
    well, whom nobody hears; it goes on until every worker of its own start has its answer.
    """
    word = uuid.uuid4().hex
    if rank != 0:
        store.set(f"ask/{rank}", word)
        name = wait_for_key(store, f"answer/{word}", timeout, go_on)
        store.add(f"{name}/taken", 1)
        return name

    def has_answered_all() -> bool:
        for other in range(1, world_size):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", word)
        return store.add(f"{word}/taken", 0) == world_size - 1

    if not poll(has_answered_all, timeout):
        num_met = store.add(f"{word}/taken", 0) + 1
        raise GroupError(f"{num_met} of {world_size} workers met within {timeout}")
    return word


def _connect(environment: WorkerEnvironment) -> Store:
    if (own := own_store()) is not None:
        own.set_timeout(JOIN_TIMEOUT)
        return own
    if not environment.master_addr:
        return HashStore()
    try:
        store: Store = TCPStore(
            environment.master_addr,
            environment.master_port,
            is_master=environment.rank == 0 and not environment.is_store_hosted,
            timeout=JOIN_TIMEOUT,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        place = f"{environment.master_addr}:{environment.master_port}"
        raise GroupError(f"no store at {place}: {error}") from error
    return store


def _leave(environment: WorkerEnvironment, store: Store) -> None:
    """Use the store no more; the worker that hosts it returns after all others."""
    if own_store() is not None or environment.is_store_hosted or environment.world_size == 1:
        return
    if environment.rank == 0:
        wait_for_key(store, "left/all", COLLECTIVE_TIMEOUT, go_on)
    elif store.add("left/count", 1) == environment.world_size - 1:
        store.set("left/all", "left")

"""Process groups of one generation: opened under a deadline, broken from any thread, forgotten.

The order over a process's life:

    world = World(device_type="cpu")
    world.open(store=..., ...)   # forgets the groups before
    open_axes((2, 2))            # belongs to the same world
    ...                          # another thread: break_now()

gloo waits for the connection of a rank that has failed before it connected, and holds no socket
meanwhile that a break could shut down. So gloo connects in threads of their own, which a broken
generation leaves behind: they end with the deadline of that opening.

Nothing is destroyed on the way. To destroy a group waits for its queue, joins its threads and waits
for a tick of gloo's loop for every connection (10 to 60 ms). torch lets go of the interpreter's
lock when the last reference of Python goes; so a thread drops that reference, while the training
thread opens the next group. What holds a group in C++ (DDP's reducer) keeps the lock there, and so
deadlocks with gloo's threads; it has no place in a process that lives on.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, _unregister_all_process_groups
from torch.distributed.distributed_c10d import (
    ProcessGroup,
    ProcessGroupGloo,
    _set_pg_timeout,
    _update_default_pg,
    _world,
)

from resilience.comm.agent_store import AgentStore
from resilience.comm.leaders import LeaderGroup, describe_unmet
from resilience.comm.sockets import TcpSocket, open_sockets, shut_down, sockets_since
from resilience.comm.waits import slice_waits
from resilience.errors import BrokenError, GroupOpenError, ResilienceError

_T = TypeVar("_T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""How long a collective waits where its generation is not broken."""

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The default group's; another type of device is the name of a backend."""

_SWEEP_S = 0.002
"""Between two looks for sockets that a thread opens while its generation is being broken."""

_CONNECT_SLICE_S = 0.1
"""How long a part of an opening may outlive its generation before it is left behind."""


class World:
    """One generation's store and groups, and the only right to break them.

    Its connections are those that appear while `opening` runs, in whatever thread. A late
    `break_now` finds none of the next generation's: it knows its own by inode, and no block of
    its own is open any more.
    """

    def __init__(self, *, device_type: str) -> None:
        self._device_type = device_type
        self._lock = threading.RLock()
        self._sockets: frozenset[TcpSocket] = frozenset()
        self._before: frozenset[TcpSocket] | None = None
        self._nccl: list[Backend] = []
        self._is_broken = False
        self._closed = threading.Event()
        self._store: AgentStore | None = None
        self.leaders: list[LeaderGroup] = []
        """One where the default group takes no tensors in host memory."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Return what is held while the generation is broken."""
        return self._lock

    @property
    def is_broken(self) -> bool:
        """Return whether this generation has been ended."""
        return self._is_broken

    @property
    def store(self) -> AgentStore:
        """Return the generation's own store, whose calls end with the generation."""
        assert self._store is not None
        return self._store

    def open(
        self,
        *,
        store: AgentStore,
        rank: int,
        world_size: int,
        timeout: timedelta,
        collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
        num_local_ranks: int = 1,
    ) -> ProcessGroup:
        """Meet the other ranks in the generation's store, and forget all groups there were.

        Returns what takes tensors in host memory: torch's default group on a CPU, else a
        LeaderGroup, which has a few of a group's methods. Raises GroupOpenError after `timeout`,
        and BrokenError as soon as the world is broken.
        """
        global _current  # noqa: PLW0603 - as the default group is
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
            raise ResilienceError(
                "TORCH_GLOO_LAZY_INIT is set: connections made later cannot be told from a user's "
                "own, so nothing could break them; unset it"
            )
        store.set_timeout(timeout)
        with self._lock:
            self._store = store
        with self.opening():
            forget_world()
            self._open_default(store, rank, world_size, timeout)
            group: ProcessGroup | None = dist.group.WORLD
            assert group is not None
            _set_pg_timeout(collective_timeout, group)
            if self._device_type != "cpu":
                leaders = LeaderGroup(
                    store,
                    rank=rank,
                    world_size=world_size,
                    num_local_ranks=num_local_ranks,
                    timeout=timeout,
                    collective_timeout=collective_timeout,
                    opening=self.opening,
                    is_broken=lambda: self._is_broken,
                )
                self.leaders.append(leaders)
                group = cast("ProcessGroup", leaders)
        _current = self
        if self._device_type == "cpu":
            slice_waits(lambda: self._is_broken)
        return group

    def _open_default(
        self, store: AgentStore, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        # Every opening would wrap the hook once more.
        hook = sys.excepthook
        try:
            dist.init_process_group(
                _BACKENDS.get(self._device_type, self._device_type),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
        except RuntimeError as error:
            raise GroupOpenError(describe_unmet(range(world_size), timeout, error)) from error
        finally:
            sys.excepthook = hook

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Own the connections that are made in the block; several blocks may follow each other.

        Raises BrokenError where the generation has ended before or meanwhile, whatever the
        block itself ran into then.
        """
        with self._lock:
            self.check()
            self._before = open_sockets()
            self._closed.clear()
        is_broken = False
        try:
            try:
                with _connecting_apart(lambda: self._is_broken):
                    yield
            finally:
                is_broken = self._close()
        except Exception as error:
            if is_broken:
                raise BrokenError("the generation ended while its groups were opened") from error
            raise
        self.check()

    def break_now(self) -> None:
        """End every wait of this generation; from any thread, any number of times.

        While groups are being opened the call returns when the opening has ended. On a GPU NCCL
        comes last: an aborted collective lets the stream run on over garbage, and no gate over gloo
        may be passed after that.
        """
        with self._lock:
            if self._is_broken:
                return
            self._is_broken = True
            if self._store is not None:
                self._store.break_now()
            shut_down(self._sockets)
            _abort(self._nccl)
            self._nccl.clear()
            is_opening = self._before is not None
        while is_opening:
            with self._lock:
                is_opening = self._sweep()
            self._closed.wait(_SWEEP_S)

    def _sweep(self) -> bool:
        """Shut down what belongs to the open block; returns whether there is one."""
        if self._before is None:
            return False
        shut_down(sockets_since(self._before))
        _abort(_nccl_backends())
        return True

    def _close(self) -> bool:
        """Take over what the block has connected; returns whether it was broken meanwhile."""
        with self._lock:
            assert self._before is not None
            opened = sockets_since(self._before)
            self._sockets |= opened
            self._nccl = _nccl_backends()
            self._before = None
            if self._is_broken:
                shut_down(opened)
                _abort(self._nccl)
                self._nccl.clear()
            self._closed.set()
            return self._is_broken

    def check(self) -> None:
        """Raise BrokenError where the generation has ended."""
        if self._is_broken:
            raise BrokenError("the generation has ended")


@contextmanager
def _connecting_apart(is_broken: Callable[[], bool]) -> Iterator[None]:
    """Have gloo's groups that are opened in the block connect in threads of their own."""
    connect: Callable[..., None] = ProcessGroupGloo.__init__

    def connect_apart(group: ProcessGroupGloo, *arguments: Any, **options: Any) -> None:
        _run_apart(partial(connect, group, *arguments, **options), is_broken)

    setattr(ProcessGroupGloo, "__init__", connect_apart)  # noqa: B010 - torch's own code calls it
    try:
        yield
    finally:
        setattr(ProcessGroupGloo, "__init__", connect)  # noqa: B010


def _run_apart(call: Callable[[], _T], is_broken: Callable[[], bool]) -> _T:
    """Return what a call returns in a thread, which a broken generation leaves behind."""
    ended = threading.Event()
    results: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            problems.append(error)
        ended.set()

    threading.Thread(target=run, name="open-group").start()
    while not ended.wait(_CONNECT_SLICE_S):
        if is_broken():
            raise BrokenError("the generation ended while its ranks connected")
    if problems:
        raise problems.pop()
    return results.pop()


_current: World | None = None
"""Whose groups torch knows now; None where no World has opened them."""


def opening_groups() -> AbstractContextManager[None]:
    """Own the connections of all groups that the block opens over the open world.

    For a framework that opens its own; each rank has to open the same ones in the same order.
    """
    return nullcontext() if _current is None else _current.opening()


def open_axes(
    sizes: Sequence[int], *, collective_timeout: timedelta = COLLECTIVE_TIMEOUT
) -> list[ProcessGroup]:
    """Open this rank's group along each axis of a mesh over the open world.

    Each rank has to call it, with the same sizes and after the same other groups.
    """
    mesh = torch.arange(dist.get_world_size()).view(*sizes)
    rows = [mesh.movedim(axis, -1).reshape(-1, size) for axis, size in enumerate(sizes)]
    with opening_groups():
        return [_open_axis(each.tolist(), collective_timeout) for each in rows]


def _open_axis(rows: list[list[int]], collective_timeout: timedelta) -> ProcessGroup:
    rank = dist.get_rank()
    own: ProcessGroup | None = None
    for ranks in rows:
        try:
            group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        except RuntimeError as error:
            raise GroupOpenError(describe_unmet(ranks, COLLECTIVE_TIMEOUT, error)) from error
        if rank in ranks:
            own = group
    assert own is not None
    _set_pg_timeout(collective_timeout, own)
    return own


def forget_world() -> None:
    """Make torch forget all groups of this process without destroying any here.

    Numbering starts anew, so that a process that joins later gives the same names to its groups.
    A group ends in a thread of its own, when its queue is empty: break its generation before.
    """
    global _current  # noqa: PLW0603
    slice_waits(None)
    forgotten: list[Any] = list(_world.pg_map)
    if _current is not None:
        forgotten += _current.leaders
        _current.leaders.clear()
    _current = None
    _update_default_pg(None)
    for known in (
        _world.pg_map,
        _world.pg_names,
        _world.pg_group_ranks,
        _world.pg_backend_config,
        _world.pg_to_tag,
        _world.tags_to_pg,
        _world.pg_coalesce_state,
    ):
        known.clear()
    _unregister_all_process_groups()
    _world.group_count = 0
    if forgotten:
        drop_groups(forgotten)


def drop_groups(groups: list[Any]) -> None:
    """Empty the list of references to forgotten groups in a thread.

    For whoever keeps a group over the end of its generation: to drop the last reference joins
    the group's threads, and one may stay for minutes in a send that its peer never asked for.
    """
    # At the process's end as well: it does not wait for such a send.
    threading.Thread(target=groups.clear, name="forget-world", daemon=True).start()


def _nccl_backends() -> list[Backend]:
    """Return the NCCL backends of all groups that torch knows now."""
    found = []
    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # a group without a backend for GPUs
            backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
            if backend.name() == "nccl":
                found.append(backend)
    return found


def _abort(backends: Sequence[Backend]) -> None:
    for backend in backends:
        backend.abort()

"""Process groups that a program makes once and that work in every generation.

A program makes its groups in its set-up, before its training loop. The first time these are groups
of gloo, and the results of their collectives are noted. A process that takes a lost rank's place
runs the set-up alone, while the others wait for it: its collectives return what was noted. From
then on each group forwards to a group of the current generation, so that whatever holds it (DDP, a
mesh, a variable) needs no new one.

torch makes groups by the class that its module calls ProcessGroupGloo. That name is replaced while
a set-up runs, and nothing else of torch's; the tests try it with each supported version.
"""

# ruff: noqa: SLF001 - torch has no public way to put a group in the place of another

from __future__ import annotations

import json
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import (
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d
from torch.futures import Future

from resilience.errors import StateError

if TYPE_CHECKING:  # older torch has no such type
    from torch.distributed.distributed_c10d import GroupName

NOTE_BYTES_MAX = 1 << 20
"""A larger result is not noted. That of a module's own tensors is repaired with the state."""
_NOTES_BYTES_MAX = 32 << 20
_OWN_SYNC = (
    "torch/nn/parallel/distributed.py",
    "torch/distributed/fsdp/",
    "accelerate/utils/fsdp_utils.py",
)
"""Files of torch and accelerate that bring all ranks to one rank's parameters."""

_Outputs = Callable[[Sequence[Any]], Sequence[Tensor]]
_SAME: dict[str, _Outputs] = {
    "allreduce": lambda given: given[0],
    "allreduce_coalesced": lambda given: given[0],
    "broadcast": lambda given: given[0],
    "allgather": lambda given: [each for row in given[0] for each in row],
    "allgather_coalesced": lambda given: [each for row in given[0] for each in row],
    "_allgather_base": lambda given: given[:1],
    "all_gather_single": lambda given: given[:1],
    "allgather_into_tensor_coalesced": lambda given: given[0],
    "barrier": lambda given: (),
    "monitored_barrier": lambda given: (),
}
"""Collectives that leave the same on each rank of their group, and the tensors they leave it in."""
_OWN: dict[str, _Outputs] = {
    "gather": lambda given: [each for row in given[0] for each in row],
    "reduce": lambda given: given[0],
    "scatter": lambda given: given[0],
    "reduce_scatter": lambda given: given[0],
    "_reduce_scatter_base": lambda given: given[:1],
    "reduce_scatter_single": lambda given: given[:1],
    "reduce_scatter_tensor_coalesced": lambda given: given[0],
    "alltoall": lambda given: given[0],
    "alltoall_base": lambda given: given[:1],
    "all_to_all_single": lambda given: given[:1],
    "send": lambda given: (),
    "recv": lambda given: given[0],
    "recv_anysource": lambda given: given[0],
}
"""Collectives that leave each rank something of its own."""
_ON_GLOO = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Names that a ProcessGroup has and its backend has not."""


class LastingGroup(dist.ProcessGroup):
    """A group that stays the same object over all generations."""

    _check: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, store: Store, rank: int, size: int, timeout: Any = None, **_: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")
        self.ranks: tuple[int, ...] = ()
        """Ranks of the world, once the set-up is over."""
        self.real: Any = None
        """The group of the current generation, or that of the first set-up."""
        self.num_calls = 0
        assert _set_up is not None
        _set_up.groups.append(self)
        if not _set_up.is_replay:
            self.real = ProcessGroupGloo(store, rank, size, timeout=timeout)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the group's ranks in the world."""
        return self.ranks or tuple(self.options.global_ranks_in_group) or tuple(range(self.size()))

    @property
    def group_name(self) -> GroupName:
        """Return the name under which torch finds the group."""
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return no name of torch's: DDP would look for that backend's own object."""
        return "lasting"

    @classmethod
    def check_calls(cls, check: Callable[[str], None]) -> None:
        """Have `check` called with the name of each collective of any group, before it is begun."""
        cls._check = staticmethod(check)

    @classmethod
    def check_now(cls, call: str) -> None:
        """Do what is done before a collective, for a call that leads to one."""
        cls._check(call)

    def end_set_up(self, ranks: Sequence[int]) -> None:
        """Keep the group's ranks in the world, which torch forgets with each generation."""
        self.ranks = tuple(ranks)

    def forward_to(self, real: Any) -> Any:
        """Take the group of a new generation; returns the one before."""
        before, self.real = self.real, real
        return before

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the real group counts."""

    def _set_group_name(self, name: str) -> None:
        """Do nothing: see `group_name`."""

    def run(self, name: str, outputs: _Outputs, given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run a collective: on the real group, or from notes."""
        set_up = _set_up
        if set_up is None:
            self._check(name)
            work = self._call(name, given, named)
            if work is not None and sys._getframe(2).f_globals is not vars(distributed_c10d):
                # C++ has called, for a DTensor or DDP, and its own wait outlives the generation.
                work.wait()
            return work
        tensors = list(outputs([*given, *named.values()]))
        self.num_calls += 1
        if set_up.is_replay:
            is_root = name == "broadcast" and given[1].rootRank == self.rank()
            set_up.replay(self, name, tensors, is_root=is_root)
        else:
            work = self._call(name, given, named)
            if work is not None:
                work.wait()
            set_up.note(self, name, tensors)
        return _done(given[0] if given else [])

    def _call(self, name: str, given: Sequence[Any], named: dict[str, Any]) -> Any:
        call = getattr(self.real, name, None) or getattr(self.real, _ON_GLOO.get(name, name))
        return call(*given, **named)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def _make_method(name: str, outputs: _Outputs) -> Callable[..., Any]:
    def method(self: LastingGroup, *given: Any, **named: Any) -> Any:
        return self.run(name, outputs, given, named)

    return method


for _name, _found in {**_SAME, **_OWN}.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(LastingGroup, _name, _make_method(_name, _found))


class SetUp:
    """The set-up of this process: noted where all ranks run theirs, replayed where one does.

    `read_notes` returns what `write_notes` of another process did; None where there is none.
    """

    def __init__(self, read_notes: Callable[[], str] | None = None) -> None:
        self.is_replay = read_notes is not None
        self.begun_s = time.monotonic()
        self.groups: list[LastingGroup] = []
        self._read_notes = read_notes
        self._notes: dict[str, list[Any]] = {}
        self._num_bytes = 0

    def note(self, group: LastingGroup, name: str, tensors: Sequence[Tensor]) -> None:
        """Keep the results of a collective for a process that takes this rank's place.

        Raises StateError for results that are too large to be kept, but for those by which torch
        brings all ranks to one rank's parameters.
        """
        num_bytes = sum(each.nbytes for each in tensors)
        is_kept = num_bytes <= NOTE_BYTES_MAX and self._num_bytes + num_bytes <= _NOTES_BYTES_MAX
        if is_kept:
            self._num_bytes += num_bytes
        elif not _is_own_sync():
            raise StateError(
                f"{name} in the set-up leaves {num_bytes} bytes; a process that takes a lost "
                f"rank's place can be given {NOTE_BYTES_MAX} of one collective and "
                f"{_NOTES_BYTES_MAX} in all: read or make large data on each rank"
            )
        values = [_to_text(each) if is_kept else None for each in tensors]
        self._notes[_key(group, name)] = [name, _describe(tensors), values]

    def replay(
        self, group: LastingGroup, name: str, tensors: Sequence[Tensor], *, is_root: bool
    ) -> None:
        """Give what a collective of the first set-up left; raises StateError where it differs."""
        if self._read_notes is not None:
            self._notes, self._read_notes = json.loads(self._read_notes()), None
        found = self._notes.get(_key(group, name))
        wanted = [name, _describe(tensors)]
        if found is None or found[:2] != wanted:
            told = "no collective" if found is None else f"{found[0]} of {found[1]}"
            raise StateError(
                f"the set-up of a process that takes a lost rank's place calls {name} of "
                f"{wanted[1]} where the first set-up called {told}; a set-up has to do the same "
                "each time: let rank 0 broadcast, as a tensor, which checkpoint to load"
            )
        with torch.no_grad():
            for tensor, text in zip(tensors, found[2], strict=True):
                if text is None:
                    continue
                if is_root and _to_text(tensor) != text and not _is_own_sync():
                    sys.stderr.write(
                        "the set-up broadcasts other bytes than the first one did, which it is "
                        "given in their place: what follows from its own would differ\n"
                    )
                _fill(tensor, text)

    def share(self) -> None:
        """Bring the notes of all ranks to each; called by all at the end of the first set-up."""
        own = {key: each for key, each in self._notes.items() if _is_told_by(key, dist.get_rank())}
        data = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        sizes[dist.get_rank()] = 0 if not own else data.numel()
        group = self._real_world()
        group.allreduce([sizes]).wait()
        for rank, size in enumerate(sizes.tolist()):
            if size:
                part = data if rank == dist.get_rank() else torch.empty(size, dtype=torch.uint8)
                options = dist.BroadcastOptions()
                options.rootRank = rank
                group.broadcast([part], options).wait()
                self._notes.update(json.loads(bytes(part.tolist())))

    def write_notes(self) -> str:
        """Return the notes of all ranks."""
        return json.dumps(self._notes)

    def _real_world(self) -> Any:
        world = dist.group.WORLD
        assert isinstance(world, LastingGroup)
        return world.real


_set_up: SetUp | None = None
_lasting: dict[LastingGroup, GroupName] = {}
"""The groups of the set-up with their names, once it is over."""
_num_groups = 0
"""Number of groups that the set-up has made on any rank; the next group gets this number."""


def begin_set_up(set_up: SetUp) -> None:
    """Have all groups of gloo that are made from now on be lasting ones."""
    global _set_up  # noqa: PLW0603 - a process has one set-up
    _set_up = set_up
    distributed_c10d.ProcessGroupGloo = LastingGroup  # type: ignore[misc, assignment]


def end_set_up() -> SetUp | None:
    """Have torch make its own groups again; returns the set-up that ends, if there was one."""
    global _set_up, _num_groups  # noqa: PLW0603
    found, _set_up = _set_up, None
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
    if found is not None:
        world = distributed_c10d._world
        _num_groups = world.group_count
        for group in found.groups:
            if group in world.pg_names:  # else it was destroyed
                group.end_set_up(list(world.pg_group_ranks[group]))
                _lasting[group] = world.pg_names[group]
    return found


def current_set_up() -> SetUp | None:
    """Return the set-up that this process is in."""
    return _set_up


def bind_groups() -> list[Any]:
    """Put the open world's groups behind the lasting ones, which torch then knows as its own.

    Every rank calls it in each generation, in the block of `opening_groups`. Returns the groups of
    the generation before, for `drop_groups`.
    """
    whole = dist.group.WORLD
    assert whole is not None
    before = []
    for group in _lasting:
        is_all = len(group.ranks) == dist.get_world_size()
        ranks = list(group.ranks)
        real = whole if is_all else dist.new_group(ranks, use_local_synchronization=True)
        before.append(group.forward_to(real))
    for group, name in _lasting.items():
        _register(group, name)
    # torch counts anew in each world, and would give a name that is taken.
    distributed_c10d._world.group_count = _num_groups
    # The program's own collectives come by here, so that those out of place can be refused.
    if first := next((each for each in _lasting if each.real is whole), None):
        distributed_c10d._update_default_pg(first)
    return before


def _register(group: LastingGroup, name: GroupName) -> None:
    world = distributed_c10d._world
    # The ranks of a group that is made later meet in this store.
    world.pg_map[group] = world.pg_map[group.real]
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(group.ranks)}
    world.pg_backend_config[group] = "cpu:gloo"
    with suppress(RuntimeError):  # where the generation has no group of this name
        _unregister_process_group(name)
    _register_process_group(name, group)


def _key(group: LastingGroup, name: str) -> str:
    ranks = group.members
    own = f"/{ranks[group.rank()]}" if name in _OWN else ""
    assert _set_up is not None
    same = [each for each in _set_up.groups if each.members == ranks]
    return f"{','.join(map(str, ranks))}/{same.index(group)}/{group.num_calls}{own}"


def _is_told_by(key: str, rank: int) -> bool:
    """Return whether a rank tells the others of a note: one of a group does, or the owner."""
    ranks, _, _, *owner = key.split("/")
    return rank == int(owner[0] if owner else ranks.split(",")[0])


def _describe(tensors: Sequence[Tensor]) -> list[str]:
    return [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors]


def _to_text(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return b64encode(plain.numpy().tobytes()).decode()


def _fill(tensor: Tensor, text: str) -> None:
    data = b64decode(text)
    if data:
        plain = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensor.detach().copy_(plain.view(tensor.dtype).view(tensor.shape))


def _is_own_sync() -> bool:
    """Return whether torch's own wrappers of a model have called the collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if any(each in name for each in _OWN_SYNC):
            return True
        frame = frame.f_back
    return False

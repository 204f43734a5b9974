"""What the ranks of the tests' nodes do. Each program is one function of a rank."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from resilience.errors import TransferError
from resilience.state.digest import digest_state
from resilience.state.move import _TAG_CHECKSUMS, MoveResult, run_transfers
from resilience.state.ring import MESSAGE_BYTES
from resilience.state.shared import SharedState
from resilience.state.torch_state import TorchState, materialise
from tests.resilience.state.nodes import CHUNK_BYTES, SOON, PlainView, Rank, run_node

MANY_BYTES = 300_000
"""Several times round the ring of the tests' slots."""

PLACE_BYTES = 64 << 20
"""A state whose pages can be told from all others."""

TINY_TENSORS = range(5, 105)
"""Where `odd_tensors` has many of one value each."""


def program(function: Callable[[Rank], None]) -> Callable[[list[str]], int]:
    """Make a function of a rank what the fork server can start."""

    @wraps(function)
    def run(arguments: list[str]) -> int:
        return run_node(function, arguments)

    return run


def odd_tensors(seed: int) -> list[Tensor]:
    """Return tensors of many types, sizes and strides; other seeds, other values."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    tiny = [torch.full((), seed + n, dtype=torch.float32) for n in range(len(TINY_TENSORS))]
    return [
        normal(3, 5),
        torch.empty(0),
        normal(7).to(torch.bfloat16),
        normal(40, 30).t(),
        torch.empty(4, 0, 3, dtype=torch.bfloat16),
        *tiny,
        normal(20, 6)[::2, 1:4],
        torch.tensor([bool(seed % 2), True]),
        normal(MANY_BYTES // 4),
        torch.tensor(seed, dtype=torch.int64),
        normal(2, 3, 4, 4).to(memory_format=torch.channels_last),
        normal(1001).to(torch.float16),
        nn.Parameter(normal(33)).detach(),
    ]


def move(
    rank: Rank, view: Any, group: ProcessGroup, pairs: list[tuple[int, int]], **options: Any
) -> MoveResult:
    if rank.shared is not None and rank.shared.local_rank is None:
        rank.shared.adopt(view, rank.rank)
    return run_transfers(
        [(source, target, rank.is_same_node) for source, target in pairs],
        view=view,
        rank=rank.rank,
        group=group,
        transfer_buffer=rank.transfer_buffer,
        local_ranks=range(rank.num_ranks),
        shared=rank.shared,
        **options,
    )


def move_and_tell(rank: Rank, pairs: list[tuple[int, int]]) -> None:
    """Move states that are unlike on all ranks; tell whose each has then."""
    values = rank.lay_out(odd_tensors(rank.rank))
    view = PlainView(values, {"position": rank.rank, "lr": 0.1 + rank.rank})
    chunks: list[int] = []
    result = move(rank, view, rank.open_group(), pairs, on_chunk=chunks.append)
    contents = [PlainView(odd_tensors(n)).content() for n in range(rank.num_ranks)]
    rank.tell(
        {
            "has_state_of": contents.index(view.content()),
            "rest": view.rest,
            "num_bytes": result.num_bytes,
            "source": result.source,
            "chunks": chunks,
            "is_shared": rank.shared is not None and rank.shared.holds(view.tensors()),
        }
    )


@program
def three_targets(rank: Rank) -> None:
    move_and_tell(rank, [(0, 3), (0, 1), (0, 2)])


@program
def crossing_lists(rank: Rank) -> None:
    """Two sources of two targets each, whose turns are mixed in the list; one rank watches."""
    move_and_tell(rank, [(1, 4), (0, 3), (1, 2), (0, 5)])


@program
def no_tensors(rank: Rank) -> None:
    view = PlainView([torch.empty(0)], {"position": rank.rank})
    move(rank, view, rank.open_group(), [(0, 1)])
    rank.tell(view.rest)


@program
def unlike_layouts(rank: Rank) -> None:
    values = [torch.zeros(2), torch.zeros(3 + rank.rank)]
    _tell_fault(rank, lambda group: move(rank, PlainView(values), group, [(0, 1)]))


@program
def unlike_numbers(rank: Rank) -> None:
    values = [torch.zeros(2)] * (1 + rank.rank)
    _tell_fault(rank, lambda group: move(rank, PlainView(values), group, [(0, 1)]))


@program
def unlike_paths(rank: Rank) -> None:
    """One rank believes the other to be on its node, the other does not."""

    def run(group: ProcessGroup) -> object:
        return run_transfers(
            [(0, 1, rank.rank == 0)],
            view=PlainView([torch.zeros(2)]),
            rank=rank.rank,
            group=group,
            transfer_buffer=rank.transfer_buffer,
            local_ranks=[0, 1],
        )

    _tell_fault(rank, run)


class FlippingGroup:
    """A group in which the last bit of one chunk that arrives is another than was sent."""

    def __init__(self, group: ProcessGroup, *, chunk: int) -> None:
        self.send = group.send
        self._group = group
        self._num_before = chunk

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        work = self._group.recv(tensors, source, tag)
        return cast(Work, _FlippingWork(self, work, tensors[0]))

    def flip(self, message: Tensor) -> None:
        if message.numel() > MESSAGE_BYTES:
            self._num_before -= 1
            if self._num_before == -1:
                message[-1] ^= 1


class MisheardGroup(FlippingGroup):
    """A group in which a letter of the rest arrives as another."""

    def flip(self, message: Tensor) -> None:
        if message.dtype is torch.uint8:
            message[-2] ^= 1


class _FlippingWork:
    def __init__(self, group: FlippingGroup, work: Work, message: Tensor) -> None:
        self._group, self._work, self._message = group, work, message

    def wait(self) -> None:
        self._work.wait()
        self._group.flip(self._message)


@program
def flipped_bit(rank: Rank) -> None:
    """The third chunk changes between the source's write and the target's read."""
    size = MANY_BYTES if rank.is_same_node else 5 * MESSAGE_BYTES
    view = PlainView([torch.full((size,), 85 if rank.rank == 0 else 0, dtype=torch.uint8)])
    end = 4096 + 3 * CHUNK_BYTES
    third = rank.transfer_buffer.slot(1)[end - CHUNK_BYTES : end]

    flipped = rank.folder / "flipped"

    def flip(chunk: int) -> None:
        if rank.shared is not None:
            while not flipped.exists():
                os.sched_yield()
            return
        while rank.is_same_node and chunk == 0 and third[-1] == 0:
            os.sched_yield()
        if chunk == 0:
            third[100] ^= 1

    def run(group: ProcessGroup) -> object:
        if rank.rank == 1 and not rank.is_same_node:
            group = cast(ProcessGroup, FlippingGroup(group, chunk=2))
        if rank.rank == 0 and rank.shared is not None:
            group = cast(ProcessGroup, HashedGroup(group, flip_own))
        return move(rank, view, group, [(0, 1)], on_chunk=flip)

    def flip_own() -> None:
        view.values[0][2 * CHUNK_BYTES + 100] ^= 1
        flipped.touch()

    _tell_fault(rank, run)


@program
def changed_rest(rank: Rank) -> None:
    """A number of the rest becomes another, which only its checksum tells."""
    view = PlainView([torch.empty(0)], {"position": 10})

    def run(group: ProcessGroup) -> object:
        misheard = cast(ProcessGroup, MisheardGroup(group, chunk=0))
        return move(rank, view, misheard if rank.rank == 1 else group, [(0, 1)])

    _tell_fault(rank, run)


class HashedGroup:
    """A group of a source which does something when its checksums are made, not yet sent."""

    def __init__(self, group: ProcessGroup, run: Callable[[], None]) -> None:
        self.recv = group.recv
        self._group, self._run = group, run

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Work:
        if tag == _TAG_CHECKSUMS:
            self._run()
        return self._group.send(tensors, target, tag)


@program
def killed_source(rank: Rank) -> None:
    """The source is killed when the target has its second chunk."""
    group = rank.open_group(SOON)
    view = PlainView([torch.zeros(MANY_BYTES if rank.is_same_node else 40 << 20)])
    if rank.rank == 0:
        (rank.folder / "pid").write_text(str(os.getpid()))

    def kill(chunk: int) -> None:
        if chunk == 1:
            os.kill(int((rank.folder / "pid").read_text()), signal.SIGKILL)

    group.barrier().wait()
    if rank.shared is not None:
        # On this way it is sooner ready than the target: it dies before it has said so.
        group = cast(ProcessGroup, HashedGroup(group, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    try:
        move(rank, view, group, [(0, 1)], on_chunk=None if rank.shared else kill)
    except RuntimeError as error:
        rank.tell(str(error))


@program
def killed_target(rank: Rank) -> None:
    _fail_at_second_chunk(rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


@program
def shut_sockets(rank: Rank) -> None:
    """The target's own sockets are shut down within the transfer, as a broken generation's are."""
    _fail_at_second_chunk(rank, _shut_own_sockets)


def _fail_at_second_chunk(rank: Rank, fail: Callable[[], None]) -> None:
    group = rank.open_group(SOON)
    view = PlainView([torch.zeros(MANY_BYTES if rank.is_same_node else 40 << 20)])
    try:
        move(rank, view, group, [(0, 1)], on_chunk=lambda chunk: fail() if chunk == 1 else None)
    except RuntimeError as error:
        rank.tell(str(error))


def _shut_own_sockets() -> None:
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if path.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as own:
                    own.getpeername()
                    own.shutdown(socket.SHUT_RDWR)


@program
def sharded_state(rank: Rank) -> None:
    """Two copies of two shards each; the second copy gets the first one's state."""
    group = rank.open_default_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = nn.Linear(6, 5)
    for name, parameter in list(module.named_parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        spread = distribute_tensor(values, mesh, [Replicate(), Shard(0)])
        setattr(module, name, nn.Parameter(spread))
    optimizer = AdamW(module.parameters(), lr=0.1)
    materialise(optimizer)
    replica, shard = divmod(rank.rank, 2)
    state = TorchState(module, optimizer, replica=replica, shard=str(shard))
    for each in state.tensors():
        each.tensor.add_(10 * replica + shard)
    before = digest_state(state)
    assert rank.shared is None or not rank.shared.adopt(state, rank.rank)
    move(rank, state, group, [(0, 2), (1, 3)])
    names = [each.name for each in state.tensors()]
    shapes = [list(each.tensor.shape) for each in state.tensors()]
    rank.tell({"before": before, "after": digest_state(state), "names": names, "shapes": shapes})


@program
def sharded_first_step(rank: Rank) -> None:
    """Compare AdamW on DTensors with state made beforehand and with torch's own."""
    rank.open_default_group()
    mesh = init_device_mesh("cpu", (2,))
    words = []
    for is_made_before in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)]))
        optimizer = AdamW([weight], lr=0.1, amsgrad=True)
        if is_made_before:
            materialise(optimizer)
        for number in range(3):
            gradient = distribute_tensor(torch.full((5, 3), 0.5 - number), mesh, [Shard(0)])
            weight.grad = gradient
            optimizer.step()
        module = nn.ParameterDict({"weight": weight})
        words.append(digest_state(TorchState(module, optimizer)))
    rank.tell(words)


def _tell_fault(rank: Rank, run: Callable[[ProcessGroup], object]) -> None:
    try:
        run(rank.open_group())
    except TransferError as error:
        rank.tell(str(error))


@program
def one_side_in_shared_memory(rank: Rank) -> None:
    """Rank 1 has no place: it takes the state through the transfer buffer."""
    shared = rank.shared
    view = PlainView([torch.full((MANY_BYTES,), rank.rank, dtype=torch.uint8)])
    assert shared is not None
    if rank.rank == 0:
        shared.adopt(view, 0)
    run_transfers(
        [(0, 1, True)],
        view=view,
        rank=rank.rank,
        group=rank.open_group(),
        transfer_buffer=rank.transfer_buffer,
        local_ranks=[0, 1],
        shared=shared,
    )
    rank.tell([shared.holds(view.tensors()), view.values[0].any().item()])


@program
def replaced_rank(rank: Rank) -> None:
    """The place of rank 1 is one of a process that died; a spare takes it."""
    assert rank.shared is not None
    group = rank.open_group()
    view = PlainView([torch.full((PLACE_BYTES,), rank.rank, dtype=torch.uint8)])
    if rank.rank == 0:
        rank.shared.adopt(view, 0)
    else:
        child = os.fork()
        if not child:
            view.values[0].fill_(55)
            SharedState(rank.files).adopt(view, 1)
            os._exit(0)
        os.waitpid(child, 0)
    group.barrier().wait()
    before = 0
    if rank.rank == 1:
        rank.shared.prepare()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert rank.shared.adopt(view, 1, is_overwritten=True)
    left = view.values[0][-1].item()
    move(rank, view, group, [(0, 1)])
    num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    rank.shared.prepare()
    rank.tell({"left": left, "faults": num_faults, "sum": view.values[0].any().item()})


@program
def memory_of_both(rank: Rank) -> None:
    """Tell each rank's share of memory before and after the states are shared and mapped."""
    shared = rank.shared
    assert shared is not None
    group = rank.open_group()
    # What the first transfer of a process takes for itself is no part of the states.
    move(rank, PlainView([torch.zeros(4 * CHUNK_BYTES)]), group, [(0, 1)])
    view = PlainView([torch.full((PLACE_BYTES // 8,), n, dtype=torch.uint8) for n in range(8)])
    group.barrier().wait()
    before = _read_pss()
    group.barrier().wait()
    shared.adopt(view, rank.rank)
    group.barrier().wait()
    shared.prepare()
    move(rank, view, group, [(0, 1)])
    group.barrier().wait()
    after = _read_pss()
    group.barrier().wait()
    rank.tell([before, after])


def _read_pss() -> int:
    """Return this process's share of all memory but that of libraries."""
    lines = [each.split() for each in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(each[1]) << 10 for each in lines if each[0] in {"Pss_Anon:", "Pss_Shmem:"})

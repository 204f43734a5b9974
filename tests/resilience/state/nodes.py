"""A node of several ranks for tests: forks them with common memory and a group of their own.

Runs in a child of the fork server, which computes nothing and has no threads.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from resilience.state import direct
from resilience.state.ring import RING
from resilience.state.shared import SharedState
from resilience.state.state_files import create_state_files
from resilience.state.transfer_buffer import TransferBuffer, create_transfer_buffer
from resilience.state.view import NamedTensor

GROUP_TIMEOUT = timedelta(seconds=30)
SOON = timedelta(seconds=5)
"""The deadline of a group whose end is tried.

Gloo's wait sees nothing but its deadline where it begins while its connection breaks. Ranks have to
connect within it too, which takes milliseconds: they are forked together and have no more to do.
"""
CHUNK_BYTES = 16 << 10
SLOT_BYTES = 4096 + RING * CHUNK_BYTES


@dataclass
class PlainView:
    """Tensors under numbers, and a rest."""

    values: Sequence[Tensor]
    rest: dict[str, Any] = field(default_factory=dict)
    replica: int = 0
    shard: str = ""

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor(name=f"t{n}", tensor=each) for n, each in enumerate(self.values)]

    def owners(self) -> list[Tensor]:
        return list(self.values)

    def read_rest(self) -> dict[str, Any]:
        return self.rest

    def write_rest(self, rest: Any) -> None:
        self.rest = dict(rest)

    def content(self) -> list[bytes]:
        """Return the bytes of each tensor in the order of its values."""
        return [
            each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in self.values
        ]


@dataclass(frozen=True)
class Rank:
    """What a rank of the node works with."""

    rank: int
    num_ranks: int
    transfer_buffer: TransferBuffer
    folder: Path
    is_same_node: bool
    files: list[int]
    shared: SharedState | None
    groups: list[ProcessGroup] = field(default_factory=list)
    """Stay until all ranks have ended: who still connects, or is yet to read what its peer has
    said last, would take the end of the connection for a fault."""

    def lay_out(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values as this node's way of moving them wants them."""
        if self.shared is None:
            return list(values)
        return [each.clone(memory_format=torch.contiguous_format) for each in values]

    def open_group(self, timeout: timedelta = GROUP_TIMEOUT) -> ProcessGroup:
        """Return a gloo group over 127.0.0.1 of all ranks; the default one is left alone."""
        store = dist.FileStore(str(self.folder / "store"), self.num_ranks)
        group = dist.ProcessGroupGloo(store, self.rank, self.num_ranks, timeout)
        self.groups.append(group)
        return group

    def open_default_group(self) -> ProcessGroup:
        """Make the same group the default one, as meshes need."""
        store = dist.FileStore(str(self.folder / "store"), self.num_ranks)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.num_ranks)
        return dist.distributed_c10d._get_default_group()

    def tell(self, word: Any) -> None:
        """Leave a word for the test."""
        (self.folder / f"word-{self.rank}.json").write_text(json.dumps(word))


@contextmanager
def opened_state_files(number: int) -> Iterator[list[int]]:
    """Yield the files of a node's places, which are closed behind it."""
    made = create_state_files(number)
    try:
        yield made
    finally:
        for each in made:
            os.close(each)


def run_node(program: Callable[[Rank], None], arguments: list[str]) -> int:
    """Fork the ranks, wait for all, write their exit statuses; returns 0."""
    request = json.loads(arguments[0])
    num_ranks, folder = request["num_ranks"], Path(request["folder"])
    descriptor = create_transfer_buffer(num_ranks, SLOT_BYTES)
    files = create_state_files(num_ranks)
    all_ended, ended = os.pipe()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            transfer_buffer = TransferBuffer(descriptor, num_ranks, SLOT_BYTES)
            # As many chunks as through the transfer buffer, in order.
            direct.CHUNK_BYTES, direct.THREADS = CHUNK_BYTES, 1
            way = request["way"]
            shared = SharedState(files) if way == "shared" else None
            _end(
                program,
                Rank(rank, num_ranks, transfer_buffer, folder, way != "group", files, shared),
                ended,
                all_ended,
            )
        children.append(child)
    os.close(ended)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "statuses.json").write_text(json.dumps(statuses))
    return 0


def _end(program: Callable[[Rank], None], rank: Rank, ended: int, all_ended: int) -> None:
    status = 1
    try:
        program(rank)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happened
        traceback.print_exc()
    finally:
        os.close(ended)
        os.read(all_ended, 1)
        os._exit(status)

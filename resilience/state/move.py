"""Moves the state of whole ranks into ranks that lost theirs.

The tensors of a rank are one stream of bytes, cut into chunks without regard to
where a tensor ends. On one node chunks lie in the arena and only short messages
go through the process group; between nodes the chunks themselves do. Both ends
hash a chunk while the cache holds it for the copy.

    source                              target
    header, layout and rest   -->
                              <--       verdict
    chunks                    -->       at most a ring of them at a time
                              <--       words: how far the target is

Nobody polls: whoever waits is in a receive of the group, which ends with the
group's time-out, the peer's death, or when the process's sockets are shut down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed import ProcessGroup

from resilience.errors import TransferError
from resilience.state.arena import Arena
from resilience.state.digest import describe_layout
from resilience.state.ring import Link, Ring, chunk_sizes, make_ring
from resilience.state.stream import Stream
from resilience.state.view import StateView

LAYOUT_BYTES_MAX = 1 << 30

_HEADER_SIZE = 5
_FORMAT = 1
_TAG_TEXT, _TAG_VERDICT = 7100, 7101
_FINE, _BAD = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveResult:
    """What one rank had to do with the transfers."""

    num_bytes: int
    """Bytes of tensors that this rank sent or received."""
    source: int | None
    """Whom this rank has its state from; None for a rank that received none."""


def run_transfers(
    transfers: Sequence[tuple[int, int, bool]],
    *,
    view: StateView,
    rank: int,
    group: ProcessGroup,
    arena: Arena | None,
    local_ranks: Sequence[int],
    on_chunk: Callable[[int], None] | None = None,
) -> MoveResult:
    """Carry out this rank's part of all transfers (source, target, is_same_node), in list order.

    Called by every rank with the same list; returns at once on a rank that is in
    none. `rank` counts within `group`, which has to take CPU tensors; transfers
    within a node use the target's slot `local_ranks[target]` of `arena`, or the
    group where `arena` is None. `on_chunk` is called by a target with the number
    of each chunk that is in its tensors.

    A target that leaves with an error holds parts of two states. Raises
    TransferError for a layout or checksum that differs, at both ends; torch's
    RuntimeError where the group breaks; ValueError for a list in which a target
    is a source or has two.
    """
    _check_transfers(transfers)
    wanted = [each for each in transfers if rank in each[:2]]
    if not wanted:
        return MoveResult(num_bytes=0, source=None)
    state = _State(view)
    for source, target, is_same_node in wanted:
        place = arena.slot(local_ranks[target]) if arena is not None and is_same_node else None
        link = Link(group, source=source, target=target, is_source=rank == source)
        if rank == source:
            _send_state(link, state, place)
        else:
            _receive_state(link, state, place, on_chunk)
    source_rank = None if rank == wanted[0][0] else wanted[0][0]
    return MoveResult(num_bytes=state.num_bytes * len(wanted), source=source_rank)


def _check_transfers(transfers: Sequence[tuple[int, int, bool]]) -> None:
    sources = {source for source, _, _ in transfers}
    targets = [target for _, target, _ in transfers]
    if sources & set(targets):
        raise ValueError(f"ranks {sorted(sources & set(targets))} would send and receive")
    if len(set(targets)) < len(targets):
        raise ValueError(f"a rank would receive twice: targets {targets}")


class _State:
    """A view, read once for all transfers."""

    def __init__(self, view: StateView) -> None:
        self.view = view
        self.tensors = view.tensors()
        self.layout = describe_layout(self.tensors)
        self.num_bytes = sum(each.tensor.nbytes for each in self.tensors)


def _send_state(link: Link, state: _State, memory: memoryview | None) -> None:
    ring = make_ring(link, state.num_bytes, memory)
    rest = json.dumps(state.view.read_rest(), separators=(",", ":")).encode()
    text = torch.frombuffer(bytearray(state.layout + rest), dtype=torch.uint8)
    checksum = _signed(xxhash.xxh3_64_intdigest(text.numpy().data))
    sizes = [len(state.layout), len(rest), ring.chunk_bytes]
    head = torch.tensor([_FORMAT, *sizes, memory is not None, checksum])
    verdict = torch.zeros(1, dtype=torch.int64)
    answer = link.receive(verdict, _TAG_VERDICT)
    works = [link.send(head, _TAG_TEXT), link.send(text, _TAG_TEXT)]
    answer.wait()
    for work in works:
        work.wait()
    if verdict.item() != _FINE:
        raise TransferError(f"state {link} was refused; the target's error says why")
    stream = Stream(state.tensors, is_read=True)
    for number in range(len(chunk_sizes(state.num_bytes, ring.chunk_bytes))):
        ring.hand_over(number, stream.pass_chunk(ring.acquire(number)))
    ring.close()


def _receive_state(
    link: Link,
    state: _State,
    memory: memoryview | None,
    on_chunk: Callable[[int], None] | None,
) -> None:
    ring = make_ring(link, state.num_bytes, memory)
    try:
        rest = _receive_text(link, state, ring, is_shared=memory is not None)
    except TransferError:
        link.send(torch.tensor([_BAD]), _TAG_VERDICT).wait()
        raise
    ring.open()
    link.send(torch.tensor([_FINE]), _TAG_VERDICT).wait()
    stream = Stream(state.tensors, is_read=False)
    num_chunks = len(chunk_sizes(state.num_bytes, ring.chunk_bytes))
    for number in range(num_chunks):
        sent = ring.take(number)
        arrived = stream.pass_chunk(ring.place(number))
        if sent != arrived:
            ring.refuse(number)
            raise TransferError(
                f"chunk {number} of {num_chunks} {link} arrived with another checksum than it was "
                f"sent with: {arrived:016x}, not {sent:016x}"
            )
        ring.release(number)
        if on_chunk is not None:
            on_chunk(number)
    ring.close()
    state.view.write_rest(rest)


def _receive_text(link: Link, state: _State, ring: Ring, *, is_shared: bool) -> Mapping[str, Any]:
    """Return the rest of the source; raises TransferError for what does not fit this rank."""
    head = torch.zeros(_HEADER_SIZE + 1, dtype=torch.int64)
    link.receive(head, _TAG_TEXT).wait()
    *header, checksum = head.tolist()
    form, layout_bytes, rest_bytes, chunk_bytes, is_sent_shared = header
    if form != _FORMAT or not 0 <= layout_bytes + rest_bytes <= LAYOUT_BYTES_MAX:
        raise TransferError(f"state {link} begins with {header}, which is no header")
    text = torch.empty(layout_bytes + rest_bytes, dtype=torch.uint8)
    link.receive(text, _TAG_TEXT).wait()
    if _signed(xxhash.xxh3_64_intdigest(text.numpy().data)) != checksum:
        raise TransferError(
            f"the layout {link} arrived with another checksum than it was sent with"
        )
    data = text.numpy().tobytes()
    if data[:layout_bytes] != state.layout:
        difference = _describe_difference(data[:layout_bytes], state.layout)
        raise TransferError(f"state {link} does not fit: {difference}")
    if (chunk_bytes, bool(is_sent_shared)) != (ring.chunk_bytes, is_shared):
        raise TransferError(
            f"state {link} comes in chunks of {chunk_bytes} bytes "
            f"{'through' if is_sent_shared else 'beside'} the arena, expected {ring.chunk_bytes} "
            f"{'through' if is_shared else 'beside'} it; give both ranks the same arena"
        )
    rest: Mapping[str, Any] = json.loads(data[layout_bytes:])
    return rest


def _describe_difference(sent: bytes, own: bytes) -> str:
    """Say in what the first tensor differs that does."""
    sent_rows, own_rows = json.loads(sent), json.loads(own)
    for number, (theirs, ours) in enumerate(zip(sent_rows, own_rows, strict=False)):
        if theirs != ours:
            return f"tensor {number} is {_row_text(theirs)} there and {_row_text(ours)} here"
    return f"{len(sent_rows)} tensors there and {len(own_rows)} here"


def _row_text(row: Sequence[Any]) -> str:
    name, dtype, shape = row
    return f"{name} {dtype.removeprefix('torch.')}{shape}"


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number

"""Moves the state of whole ranks into ranks that lost theirs.

    source                              target
    header, layout and rest   -->
                              <--       verdict: refused, or which way
    chunks                    -->
                              <--       words: how far the target is

The tensors of a rank are one stream of bytes, cut into chunks without regard to
where a tensor ends, and hashed at both ends. There are three ways. Do both ranks
keep their tensors in the shared memory of one node, the target copies out of the
source's, the source sends but the checksums, and one word comes back at the end.
Else, on one node, chunks go through the transfer buffer and short messages through the
process group; between nodes the chunks themselves do, a ring of them at a time.

Neither side polls: a rank that waits is in a receive of the group, which ends with the group's
time-out, the peer's death, or when the process's sockets are shut down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed import ProcessGroup

from resilience.errors import TransferError
from resilience.state.digest import describe_layout
from resilience.state.direct import copy_chunks, count_chunks, hash_chunks
from resilience.state.ring import RankPair, Ring, chunk_sizes, make_ring, ring_chunk_bytes
from resilience.state.shared import Bytes, SharedState
from resilience.state.stream import Stream
from resilience.state.transfer_buffer import TransferBuffer
from resilience.state.view import StateView

LAYOUT_BYTES_MAX = 1 << 30

_HEADER_SIZE = 6
_FORMAT = 2
_TAG_TEXT, _TAG_VERDICT, _TAG_CHECKSUMS, _TAG_END = 7100, 7101, 7102, 7103
_FINE, _BAD, _FINE_DIRECT = 1, 2, 3
_NO_PLACE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveResult:
    """What one rank had to do with the transfers."""

    num_bytes: int
    """Bytes of tensors that this rank sent or received."""
    source: int | None
    """The rank that sent this rank its state; None for a rank that received none."""


def run_transfers(
    transfers: Sequence[tuple[int, int, bool]],
    *,
    view: StateView,
    rank: int,
    group: ProcessGroup,
    transfer_buffer: TransferBuffer | None,
    local_ranks: Sequence[int],
    on_chunk: Callable[[int], None] | None = None,
    on_sent: Callable[[int], None] | None = None,
    shared: SharedState | None = None,
) -> MoveResult:
    """Carry out this rank's part of all transfers (source, target, is_same_node), in list order.

    Called by every rank with the same list; returns at once on a rank that is in
    none. `rank` counts within `group`, which has to take CPU tensors; transfers
    within a node are one copy where `shared` holds the tensors of both ranks, else
    use the target's slot `local_ranks[target]` of `transfer_buffer`, or the group where
    that is None. `on_chunk` is called by a target with numbers of chunks that are in its
    tensors: of all, in order, unless a second thread copies some of them. `on_sent` is
    called by a source with the numbers of chunks that it hands over, where it does.

    A target that leaves with an error holds parts of two states. Raises
    TransferError for a layout or checksum that differs, at both ends; torch's
    RuntimeError where the group breaks; ValueError for a list in which a target
    is a source or has two.
    """
    _check_transfers(transfers)
    wanted = [each for each in transfers if rank in each[:2]]
    if not wanted:
        return MoveResult(num_bytes=0, source=None)
    state = _State(view, shared)
    for source, target, is_same_node in wanted:
        place = (
            transfer_buffer.slot(local_ranks[target])
            if transfer_buffer is not None and is_same_node
            else None
        )
        pair = RankPair(group, source=source, target=target, is_source=rank == source)
        way = _Way(place, shared if is_same_node and state.is_shared else None)
        if rank == source:
            _send_state(pair, state, way, on_sent)
        else:
            _receive_state(pair, state, way, on_chunk)
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

    def __init__(self, view: StateView, shared: SharedState | None) -> None:
        self.view = view
        self.tensors = view.tensors()
        self.layout = describe_layout(self.tensors)
        self.num_bytes = sum(each.tensor.nbytes for each in self.tensors)
        self.is_shared = shared is not None and shared.holds(self.tensors)


@dataclass(frozen=True, slots=True)
class _Way:
    """What this rank has of shared memory for one transfer."""

    slot: memoryview | None
    shared: SharedState | None
    """None where the tensors are not in it, or the peer is on another node."""

    @property
    def place(self) -> int:
        """Return the place of this rank's tensors."""
        own = self.shared.local_rank if self.shared is not None else None
        return _NO_PLACE if own is None else own


def _send_state(
    pair: RankPair, state: _State, way: _Way, on_sent: Callable[[int], None] | None
) -> None:
    rest = json.dumps(state.view.read_rest(), separators=(",", ":")).encode()
    text = torch.frombuffer(bytearray(state.layout + rest), dtype=torch.uint8)
    checksum = _signed(xxhash.xxh3_64_intdigest(text.numpy().data))
    sizes = [len(state.layout), len(rest), ring_chunk_bytes(way.slot)]
    head = torch.tensor([_FORMAT, *sizes, way.slot is not None, way.place, checksum])
    verdict = torch.zeros(1, dtype=torch.int64)
    answer = pair.receive(verdict, _TAG_VERDICT)
    works = [pair.send(head, _TAG_TEXT), pair.send(text, _TAG_TEXT)]
    answer.wait()
    for work in works:
        work.wait()
    if verdict.item() == _BAD:
        raise TransferError(f"state {pair} was refused; the target's error says why")
    if verdict.item() == _FINE_DIRECT and way.shared is not None:
        _send_checksums(pair, way.shared.own_bytes())
        return
    ring = make_ring(pair, state.num_bytes, way.slot)
    stream = Stream(state.tensors, is_read=True)
    for number in range(len(chunk_sizes(state.num_bytes, ring.chunk_bytes))):
        ring.hand_over(number, stream.pass_chunk(ring.acquire(number)))
        if on_sent is not None:
            on_sent(number)
    ring.close()


def _send_checksums(pair: RankPair, memory: Bytes) -> None:
    """Send the checksums of this rank's memory while the target copies it; wait until it has."""
    word = torch.zeros(1, dtype=torch.int64)
    end = pair.receive(word, _TAG_END)
    checksums = torch.from_numpy(hash_chunks(memory).view(np.int64))
    pair.send(checksums, _TAG_CHECKSUMS).wait()
    end.wait()
    if number := int(word.item()):
        raise TransferError(
            f"chunk {number - 1} {pair} arrived with another checksum than it was sent with"
        )


def _receive_state(
    pair: RankPair, state: _State, way: _Way, on_chunk: Callable[[int], None] | None
) -> None:
    try:
        rest, place = _receive_text(pair, state, way)
        memory = _open_source(way, place)
        ring = None if memory is not None else make_ring(pair, state.num_bytes, way.slot)
    except TransferError:
        pair.send(torch.tensor([_BAD]), _TAG_VERDICT).wait()
        raise
    if way.shared is not None and memory is not None:
        _receive_direct(pair, memory, way.shared.own_bytes(), on_chunk)
    elif ring is not None:
        _receive_chunks(pair, state, ring, on_chunk)
    state.view.write_rest(rest)


def _open_source(way: _Way, place: int) -> Bytes | None:
    """Return the source's memory; None where the way has to be another."""
    if way.shared is None or place == _NO_PLACE:
        return None
    try:
        return way.shared.open_place(place, len(way.shared.own_bytes()))
    except (OSError, ValueError):
        return None


def _receive_direct(
    pair: RankPair, source: Bytes, target: Bytes, on_chunk: Callable[[int], None] | None
) -> None:
    num_chunks = count_chunks(len(target))
    said = torch.zeros(num_chunks, dtype=torch.int64)
    work = pair.receive(said, _TAG_CHECKSUMS)
    pair.send(torch.tensor([_FINE_DIRECT]), _TAG_VERDICT).wait()
    arrived = copy_chunks(source, target, on_chunk)
    work.wait()
    sent = said.numpy().view(np.uint64)
    broken = np.flatnonzero(sent != arrived)
    number = int(broken[0]) if len(broken) else -1
    pair.send(torch.tensor([number + 1]), _TAG_END).wait()
    if number >= 0:
        raise _broken_chunk(pair, number, num_chunks, int(sent[number]), int(arrived[number]))


def _receive_chunks(
    pair: RankPair, state: _State, ring: Ring, on_chunk: Callable[[int], None] | None
) -> None:
    ring.open()
    pair.send(torch.tensor([_FINE]), _TAG_VERDICT).wait()
    stream = Stream(state.tensors, is_read=False)
    num_chunks = len(chunk_sizes(state.num_bytes, ring.chunk_bytes))
    for number in range(num_chunks):
        sent = ring.take(number)
        arrived = stream.pass_chunk(ring.place(number))
        if sent != arrived:
            ring.refuse(number)
            raise _broken_chunk(pair, number, num_chunks, sent, arrived)
        ring.release(number)
        if on_chunk is not None:
            on_chunk(number)
    ring.close()


def _broken_chunk(
    pair: RankPair, number: int, num_chunks: int, sent: int, arrived: int
) -> TransferError:
    return TransferError(
        f"chunk {number} of {num_chunks} {pair} arrived with another checksum than it was "
        f"sent with: {arrived:016x}, not {sent:016x}"
    )


def _receive_text(pair: RankPair, state: _State, way: _Way) -> tuple[Mapping[str, Any], int]:
    """Return the source's rest and place; raises TransferError for what does not fit this rank."""
    head = torch.zeros(_HEADER_SIZE + 1, dtype=torch.int64)
    pair.receive(head, _TAG_TEXT).wait()
    *header, checksum = head.tolist()
    form, layout_bytes, rest_bytes, chunk_bytes, has_slot, place = header
    if form != _FORMAT or not 0 <= layout_bytes + rest_bytes <= LAYOUT_BYTES_MAX:
        raise TransferError(f"state {pair} begins with {header}, which is no header")
    text = torch.empty(layout_bytes + rest_bytes, dtype=torch.uint8)
    pair.receive(text, _TAG_TEXT).wait()
    if _signed(xxhash.xxh3_64_intdigest(text.numpy().data)) != checksum:
        raise TransferError(
            f"the layout {pair} arrived with another checksum than it was sent with"
        )
    data = text.numpy().tobytes()
    if data[:layout_bytes] != state.layout:
        difference = _describe_difference(data[:layout_bytes], state.layout)
        raise TransferError(f"state {pair} does not fit: {difference}")
    own_bytes, has_buffer = ring_chunk_bytes(way.slot), way.slot is not None
    if (chunk_bytes, bool(has_slot)) != (own_bytes, has_buffer):
        raise TransferError(
            f"state {pair} comes in chunks of {chunk_bytes} bytes "
            f"{'through' if has_slot else 'beside'} the transfer buffer, expected {own_bytes} "
            f"{'through' if has_buffer else 'beside'} it; give both ranks the same transfer buffer"
        )
    rest: Mapping[str, Any] = json.loads(data[layout_bytes:])
    return rest, place


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

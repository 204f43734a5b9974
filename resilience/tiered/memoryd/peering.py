"""What the daemon of one node knows of the others, and how it gets shards from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from resilience.tiered.catalog import Copy, StepAt
from resilience.tiered.errors import LostError
from resilience.tiered.memoryd.http_steps import METADATA
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId, ShardMeta
from resilience.tiered.vault import Holding

OnPiece = Callable[[ShardMeta, int], None]
"""Told of each piece that has arrived: the shard's meta and the number of the piece."""


class Peers:
    """The daemons of the other nodes; as it stands, those of a node that is alone. Any thread."""

    is_alone = True
    """No other node ever comes."""

    def __init__(self, nodes: Sequence[Node] = (), gone_s: float = 0.0) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when `copies` or `living` would answer something else, by any thread and with no
        lock held; it neither blocks nor raises. Set once, before the start."""
        self._directory = Directory(
            nodes,
            gone_s=gone_s,
            on_change=lambda: self.on_change(),  # noqa: PLW0108 - it is set later
        )

    def copies(self) -> Sequence[Copy]:
        """Return what other living nodes have in memory, as they last said. Never blocks."""
        return ()

    def living(self) -> Mapping[str, str]:
        """Return the failure domain of each other node that is there. Never blocks."""
        return self._directory.living()

    def wait_known(self, timeout_s: float | None = None) -> bool:
        """Block until each node that may be there has said what it holds, or counts as gone.

        Says whether it is so; False only where there is a time-out.

        A daemon that has just begun knows of nobody yet; who asks it then would take an
        older step, or ask the store for what a peer has in memory.
        """
        return self._directory.wait_known(timeout_s)

    def unheard(self) -> Sequence[str]:
        """Return who never said what it holds since this daemon began. Never blocks.

        It may hold anything. Who was heard and is silent now is another matter.
        """
        return self._directory.unheard()

    def nameless(self) -> Sequence[str]:
        """Return the addresses whose names do not resolve for NAMELESS_S. Never blocks."""
        return ()

    def missing(self) -> Sequence[str]:
        """Return who is not there now, or has not said yet what it holds. Never blocks."""
        return self._directory.missing()

    def complete(self) -> Mapping[str, frozenset[StepAt]]:
        """Return by namespace the steps that other nodes have seen complete. Never blocks."""
        return self._directory.complete()

    def is_passing(self, shard_id: ShardId) -> bool:
        """Return whether this node holds a shard only until others keep it instead."""
        return False

    def wake(self) -> None:
        """Let the others know soon what the notes say now. Never blocks."""

    def fetch(self, copy: Copy, into: memoryview, on_piece: OnPiece) -> ShardMeta:
        """Fill `into`, of `copy.num_bytes`, from the node that has the copy.

        The meta is what that node says; it comes before the bytes, and its id is the
        copy's. `on_piece` is called when a piece (of shard.PIECE_BYTES) is in `into`, in
        their order, by the calling thread; what it raises ends the transfer and is passed
        on. Nothing is compared but sizes: the caller compares checksums and digest.

        Blocks, with a deadline on every wait. Raises LostError where the node is gone or
        silent, KeyError where it has the shard no longer, and other TieredErrors that it
        answers. Nothing is written to `into` once this has returned or raised.
        """
        raise LostError(f"node {copy.place} is not known here")

    def doubt(self, copy: Copy) -> None:
        """Let the node that has a copy look whether it is intact, and drop it if it is not.

        Blocks as `fetch` does; who cannot be asked is left alone.
        """

    def drop(self, shard_ids: Sequence[ShardId]) -> None:
        """Let all nodes that are there drop shards. Blocks as `doubt` does."""

    def wait_told(self, timeout_s: float) -> bool:
        """Block until all nodes that are there have heard the notes as they are now, or longer.

        Says whether they have. Those that this node cannot connect to are left out.
        """
        return True


def copy_in_memory(holding: Holding, node: str, *, is_passing: bool) -> Copy:
    """Return what a node tells of a shard that it holds."""
    meta = holding.meta
    return Copy(
        meta_id=meta.id,
        num_shards=meta.num_shards,
        digest=holding.digest,
        num_bytes=meta.num_bytes,
        place=node,
        tier="ram",
        is_passing=is_passing,
        is_metadata=bool(meta.rest.get(METADATA)),
    )

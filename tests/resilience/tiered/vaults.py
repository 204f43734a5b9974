"""Vaults, and shards to put into them."""

from __future__ import annotations

from collections.abc import Callable

from resilience.tiered.catalog import Copy
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.shard import ShardId, ShardMeta, content_digest
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import make_meta

Reopen = Callable[..., Vault]
"""Opens the vault of a folder, after it has ended the one before."""


def put(
    vault: Vault,
    shard_id: ShardId,
    content: bytes = b"hello",
    *,
    num_shards: int = 1,
    is_copy: bool = False,
) -> None:
    with vault.begin(shard_id, len(content), is_copy=is_copy) as writing:
        writing.memory[:] = content
        writing.commit(make_meta(shard_id, content, num_shards=num_shards))


def copy_of(meta: ShardMeta, place: str) -> Copy:
    """Return what others know of a shard in a node's memory."""
    return Copy(
        meta_id=meta.id, num_shards=meta.num_shards, digest=content_digest(meta),
        num_bytes=meta.num_bytes, place=place, tier="ram",
    )  # fmt: skip


class Neighbours(Peers):
    """The nodes that are there, and what one of them, b, holds."""

    held: tuple[ShardMeta, ...] = ()

    def __init__(self, **living: str) -> None:
        super().__init__()
        self._living = living

    def living(self) -> dict[str, str]:
        return self._living

    def copies(self) -> list[Copy]:
        return [copy_of(each, "b") for each in self.held]

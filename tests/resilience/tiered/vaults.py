"""Vaults, and shards to put into them."""

from __future__ import annotations

from collections.abc import Callable

from resilience.tiered.shard import ShardId
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

"""What one node does with memory of which others keep the content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.peer_origins import Origins
from resilience.tiered.placement import Node
from resilience.tiered.uploads import Settings
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import MIB, make_id
from tests.resilience.tiered.vaults import put

PAGE = 4096


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", MIB)
    yield arena
    arena.close()


def test_what_came_from_others_goes_before_what_a_worker_has_mapped(arena: Arena) -> None:
    taken = [arena.take(PAGE, owner) for owner in ("process-1", "peers", "process-1")]
    for each in taken:
        arena.free(each)

    arena.trim(2 * PAGE, owner="peers")
    assert arena.total_bytes == 2 * PAGE
    arena.trim(PAGE + 1, owner="peers")
    assert arena.total_bytes == 2 * PAGE, "one would be too little"
    arena.trim(0, owner="peers")
    assert arena.total_bytes == 0


def test_what_is_in_use_is_not_trimmed(arena: Arena) -> None:
    arena.take(PAGE, "peers")
    arena.trim(0, owner="peers")

    assert arena.total_bytes == PAGE


def test_what_others_keep_stays_as_long_as_it_is_read_here(arena: Arena) -> None:
    vault, shard_id = Vault(arena), make_id()
    board = Board(vault, Node(name="a", domain="a"), Settings(domains_min=1, keepers=1))
    put(vault, shard_id)

    with vault.read(shard_id):
        assert not board.pass_on([shard_id])
        assert vault.find(shard_id)
    assert board.pass_on([shard_id])
    assert vault.find(shard_id) is None


def test_who_sent_a_shard_is_known_though_another_comes_first(tmp_path: Path) -> None:
    """Two connections note what they receive, before either has it in memory."""
    first, second = make_id(1), make_id(2)
    origins = Origins(tmp_path)
    origins.note(first, "b", held=[])
    origins.note(second, "c", held=[])

    for each in (origins, Origins(tmp_path)):
        assert (each.of(first), each.of(second)) == ("b", "c")


def test_the_list_of_who_sent_what_does_not_grow(tmp_path: Path) -> None:
    origins = Origins(tmp_path)
    for step in range(500):
        origins.note(make_id(step), "b", held=[make_id(step - 1)])

    assert origins.of(make_id(0)) is None
    assert origins.of(make_id(499)) == "b"
    assert (tmp_path / "copies.json").stat().st_size < 10_000

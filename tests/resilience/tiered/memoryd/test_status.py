"""What a daemon tells of its node, its neighbours and its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.memoryd.status import describe_board
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardMeta
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.uploads import Cadence, Settings, TierSettings
from resilience.tiered.vault import Vault
from tests.resilience.tiered import vaults
from tests.resilience.tiered.daemons import MIB, make_id, make_meta
from tests.resilience.tiered.vaults import Neighbours

LOWER = TierSettings(cadence=Cadence(every_n_steps=1), keep=3)


NONE = {"num_shards": 0, "num_bytes": 0, "seconds": 0.0}


def meta(step: int, shard: str) -> ShardMeta:
    return make_meta(make_id(step, shard), f"{step} {shard}".encode(), num_shards=2)


class Scene:
    """A node with a store, a neighbour and a clock."""

    def __init__(self, folder: Path, arena: Arena) -> None:
        self.now_s = 0.0
        self.peers = Neighbours(b="rack-b")
        self.vault = Vault(arena)
        self.claim = self.vault.claim("run", "job-7")
        self.shelf = Shelf(open_folder(FolderSettings(folder=folder / "store")), "folder", "store")
        self.board = Board(
            self.vault, Node(name="a", domain="rack-a"), Settings(lower={"folder": LOWER}),
            peers=self.peers, shelf=self.shelf, clock=lambda: self.now_s,
        )  # fmt: skip

    def put(self, *metas: ShardMeta) -> None:
        for each in metas:
            content = f"{each.id.step} {each.id.shard}".encode()
            vaults.put(self.vault, each.id, content, num_shards=each.num_shards)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    arena = Arena(tmp_path / "arena", MIB)
    yield Scene(tmp_path, arena)
    arena.close()


def test_a_step_is_told_over_all_nodes_and_tiers(scene: Scene) -> None:
    scene.put(meta(1, "0"), meta(1, "1"))
    scene.peers.held = (meta(1, "0"), meta(1, "1"), meta(2, "1"))
    scene.shelf.note(meta(1, "0"))

    status = describe_board(scene.board)

    assert status["nodes"] == {"a": "rack-a", "b": "rack-b"}
    job = status["jobs"]["run"]
    assert job["job"] == "job-7"
    second, first = job["steps"]
    del first["reason"]
    assert first == {
        "step": 1, "generation": 0, "num_shards": 2, "num_bytes": 6, "shards_here": ["0", "1"],
        "ram": {"a": 2, "b": 2}, "store": 1, "tiers": ["ram"], "is_complete": True,
        "is_stale": False,
    }  # fmt: skip
    assert (second["step"], second["is_complete"], second["ram"]) == (2, False, {"b": 1})
    assert second["reason"] == "1 of 2 shards"


def test_lag_is_what_is_not_yet_on_peers_and_in_the_store(scene: Scene) -> None:
    scene.put(meta(1, "0"), meta(1, "1"))
    scene.peers.held = (meta(1, "1"),)
    scene.board.views()
    scene.now_s = 2.5
    scene.shelf.note(replace(meta(1, "1")))

    lag = describe_board(scene.board)["jobs"]["run"]["lag"]
    assert lag["peers"] == {"num_shards": 1, "num_bytes": 3, "seconds": 2.5}
    assert lag["store"] == {"num_shards": 1, "num_bytes": 3, "seconds": 2.5}

    scene.peers.held = (meta(1, "0"), meta(1, "1"))
    scene.shelf.note(meta(1, "0"))
    lag = describe_board(scene.board)["jobs"]["run"]["lag"]
    assert lag == {"peers": NONE, "store": NONE}


def test_a_namespace_of_the_http_door_has_no_store(scene: Scene) -> None:
    shard = make_meta(make_id(3, name="http:space"), b"3 0", num_shards=1)
    scene.put(shard)

    job = describe_board(scene.board)["jobs"]["http:space"]
    assert job["lag"]["store"] is None
    assert job["lag"]["peers"]["num_shards"] == 1

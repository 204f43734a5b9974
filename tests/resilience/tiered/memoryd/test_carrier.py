"""Nodes that share a store: who sends what, and who deletes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.catalog import Copy
from resilience.tiered.errors import TierError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.keeper import Keeper
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardMeta, content_digest
from resilience.tiered.stores.folder import FolderObjects, FolderSettings
from resilience.tiered.stores.store import Store
from resilience.tiered.uploads import Cadence, Settings, TierSettings
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import MIB, make_content, make_id
from tests.resilience.tiered.kept import wait_until
from tests.resilience.tiered.vaults import copy_of, put

LOWER = TierSettings(cadence=Cadence(every_n_steps=1), keep=2)


class Neighbour(Peers):
    """The other node, whose vault is looked into."""

    def __init__(self, node: str, vault: Vault) -> None:
        super().__init__()
        self._node, self._vault = node, vault

    def copies(self) -> Sequence[Copy]:
        return [copy_of(each.meta, self._node) for each in self._vault.holdings()]

    def living(self) -> Mapping[str, str]:
        return {self._node: self._node}


class CountingStore(Store):
    """Counts what is sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderObjects(FolderSettings(folder=folder)))
        self.sent: list[str] = []

    def put_data(self, namespace: str, digest: str, *given: Any, **options: bool) -> bool:
        is_sent = super().put_data(namespace, digest, *given, **options)
        self.sent += [digest] * is_sent
        return is_sent


class Pair:
    """Two nodes and their store."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.settings = Settings(lower={"folder": LOWER}, settle_s=0.1)
        self.vaults: dict[str, Vault] = {}
        for node in ("a", "b"):
            arena = Arena(folder / node, 16 * MIB)
            opened.callback(arena.close)
            self.vaults[node] = Vault(arena)
        self.stores = {node: CountingStore(folder / "store") for node in self.vaults}
        self._opened = opened

    def start(self) -> None:
        boards = []
        for node, other in (("a", "b"), ("b", "a")):
            board = Board(
                self.vaults[node],
                Node(name=node, domain=node),
                self.settings,
                peers=Neighbour(other, self.vaults[other]),
                shelf=Shelf(self.stores[node], "folder", "disk"),
            )
            boards.append(board)
            keeper = Keeper(board)
            self._opened.callback(keeper.close)
            keeper.start()

        def tell() -> None:
            for each in boards:
                each.wake()

        for vault in self.vaults.values():
            vault.on_change = tell
        tell()

    def put(self, node: str, step: int, shard: str, content: bytes) -> None:
        put(self.vaults[node], make_id(step, shard), content, num_shards=2)

    def steps(self) -> set[int]:
        return {each.step for each in self.stores["a"].list_steps("run")}

    def sent(self) -> list[str]:
        return [*self.stores["a"].sent, *self.stores["b"].sent]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as opened:
        yield Pair(tmp_path, opened)


def test_each_node_sends_its_part_and_the_older_steps_go(pair: Pair) -> None:
    def has_sent(number: int) -> bool:
        return len(set(pair.sent())) == number

    pair.start()
    for step in range(1, 5):
        pair.put("a", step, "0", make_content(MIB, step))
        pair.put("b", step, "1", make_content(MIB, 10 + step))
        wait_until(partial(has_sent, 2 * step))

    wait_until(lambda: pair.steps() == {3, 4})
    assert len(pair.sent()) == len(set(pair.sent())) == 8
    assert (len(pair.stores["a"].sent), len(pair.stores["b"].sent)) == (4, 4)


def test_what_was_deleted_while_it_was_put_is_put_again(pair: Pair) -> None:
    """Its bytes were those of a step that went: they were there, and were not sent."""
    store = pair.stores["a"]
    delete_step, lost = store.delete_step, []

    def delete_late(name: str, step: int, generation: int, **spare: Collection[str]) -> set[str]:
        deleted = delete_step(name, step, generation, **spare)
        if step == 1 and not lost:
            # As an entry of step 3 that named data which went.
            newest = [each for each in store.list_steps(name) if each.step == 3]
            metas = [meta for each in newest if (meta := store.get_meta(each))]
            deleted |= {content_digest(each) for each in metas}
            delete_step(name, 3, generation)
            lost.extend(newest)
        return deleted

    store.delete_step = delete_late  # type: ignore[method-assign]
    pair.start()
    for step in range(1, 4):
        for shard in ("0", "1"):
            pair.put("a", step, shard, make_content(MIB, 10 * step + int(shard)))
        # The newest goes first: one that two newer ones have passed is never sent.
        wait_until(lambda: step == 3 or len(pair.stores["b"].list_steps("run")) == 2 * step)  # noqa: B023

    wait_until(lambda: lost and len(pair.stores["b"].list_steps("run")) == 4)
    assert pair.steps() == {2, 3}


def test_full_store_gets_room_from_what_is_kept_no_longer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 may go when step 2 is whole, but step 3 is there by then, and finds no room."""
    store = pair.stores["a"]
    put_data, put_meta = store.put_data, store.put_meta

    def put_if_room(*given: Any, **options: bool) -> bool:
        if len(store.list_steps("run")) >= 4:
            raise TierError("no space left")
        return put_data(*given, **options)

    def put_step_behind(meta: ShardMeta) -> None:
        put_meta(meta)
        if (meta.id.step, len(store.list_steps("run"))) == (2, 4):
            for shard in ("0", "1"):
                pair.put("a", 3, shard, make_content(MIB, 30 + int(shard)))

    monkeypatch.setattr(store, "put_data", put_if_room)
    monkeypatch.setattr(store, "put_meta", put_step_behind)
    keep_one = TierSettings(cadence=Cadence(every_n_steps=1), keep=1)
    pair.settings = Settings(lower={"folder": keep_one}, settle_s=0.0)
    pair.start()
    for step in (1, 2):
        for shard in ("0", "1"):
            pair.put("a", step, shard, make_content(MIB, 10 * step + int(shard)))
        wait_until(lambda: step == 2 or len(store.list_steps("run")) == 2)  # noqa: B023

    wait_until(lambda: pair.steps() == {3})

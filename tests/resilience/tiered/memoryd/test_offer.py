"""What real daemons offer to readers, and where it comes from when memory is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.catalog import Copy
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError, TierError
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.offer import TieredOffer
from resilience.tiered.memoryd.peering import OnPiece, Peers
from resilience.tiered.memoryd.room import Room
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.placement import Node
from resilience.tiered.shard import PIECE_BYTES, ShardId, piece_bounds
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.stores.store import Store
from resilience.tiered.uploads import Settings
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.kept import (
    NODE,
    held,
    lose_memory,
    stored,
    wait_for_store,
    wait_until,
)
from tests.resilience.tiered.news_reader import Reader
from tests.resilience.tiered.s3_server import S3Server
from tests.resilience.tiered.store_places import Shard, make_shard
from tests.resilience.tiered.vaults import copy_of, put

BIG = 2 * PIECE_BYTES + 77


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Return a daemon with a folder as its store."""
    options = [*NODE, "--store", f"folder:{tmp_path / 'store'}"]
    with Daemon(folder=tmp_path / "arena", budget_mib=64, options=options).start() as each:
        yield each


def test_memory_that_is_gone_comes_back_from_s3(tmp_path: Path, server: S3Server) -> None:
    server.make_bucket("bucket")
    contents = {shard: make_content(BIG, int(shard)) for shard in ("0", "1")}
    options = [
        *(*NODE, "--store", f"s3://bucket/{tmp_path.name}", "--store-endpoint", server.endpoint),
        *("--store-part-size-mib", "5"),
    ]
    with Daemon(folder=tmp_path / "arena", budget_mib=64, options=options).start() as daemon:
        client = daemon.client()
        for shard, content in contents.items():
            save(client, make_id(8, shard), content, num_shards=2)
        wait_for_store(client, 8)
        lose_memory(daemon)

        client = daemon.start().client()

        (step,) = client.steps()
        assert (step.step, step.num_shards, step.shards) == (8, 2, ("0", "1"))
        for shard, content in contents.items():
            for source in (f"s3:bucket/{tmp_path.name}", "ram"):
                with client.read(step=8, generation=0, shard=shard) as loan:
                    assert bytes(loan.memory) == content
                    assert loan.source == source
        assert held(client) == [8]


def test_a_flipped_bit_in_the_store_is_not_loaded_and_said(daemon: Daemon, tmp_path: Path) -> None:
    for step in (1, 2):
        save(daemon.client(), make_id(step), make_content(BIG, step))
        wait_for_store(daemon.client(), step)
    lose_memory(daemon)
    broken = make_content(BIG, 2)
    for path in stored(tmp_path / "store"):
        if path.read_bytes() == broken:
            path.write_bytes(broken[:-1] + bytes([broken[-1] ^ 1]))
    client = daemon.start().client()
    assert [each.step for each in client.steps()] == [2, 1]

    for _ in range(2):
        with pytest.raises(TierError, match=r"not what their checksum says|no copy is intact"):
            load(client, make_id(2))

    assert [each.step for each in client.steps()] == [1]
    assert load(client, make_id(1)) == make_content(BIG, 1)
    assert client.status()["store"]["num_bad"] == 1
    daemon.end()
    assert "run step 2 generation 0 shard 0 from folder:" in daemon.outputs[-1]


def test_entries_that_make_no_sense_are_left_out(daemon: Daemon, tmp_path: Path) -> None:
    for step in range(1, 7):
        save(daemon.client(), make_id(step), make_content(MIB, step))
        wait_for_store(daemon.client(), step)
    lose_memory(daemon)
    for path in stored(tmp_path / "store", "steps")[1:]:
        path.write_bytes(b"{}")
    client = daemon.start().client()

    assert [each.step for each in client.steps()] == [1]
    assert load(client, make_id(1)) == make_content(MIB, 1)
    save(client, make_id(7), make_content(MIB, 7))
    wait_for_store(client, 7)
    assert "no description of a shard" in client.status()["store"]["last_error"]


def test_an_empty_job_is_told_from_a_store_that_does_not_answer(
    daemon: Daemon, tmp_path: Path
) -> None:
    client = daemon.client()
    assert client.steps() == []
    with pytest.raises(KeyError):
        load(client, make_id(1))

    # The trial at the daemon's start has made the folder.
    Reader(daemon).wait_for(trial="")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_bytes(b"no folder")

    with pytest.raises(TierError, match="Not a directory"):
        client.steps()
    with pytest.raises(TierError, match="Not a directory"):
        load(client, make_id(1))


def test_many_readers_of_one_shard_get_it_once(daemon: Daemon, tmp_path: Path) -> None:
    save(daemon.client(), make_id(1), make_content(BIG))
    wait_for_store(daemon.client(), 1)
    lose_memory(daemon)
    daemon.start()
    clients = [daemon.client() for _ in range(6)]

    def read(client: TieredClient) -> str:
        with client.read(step=1, generation=0, shard="0") as loan:
            assert bytes(loan.memory) == make_content(BIG)
            return loan.source

    with ThreadPoolExecutor(len(clients)) as pool:
        sources = sorted(pool.map(read, clients))

    assert sources == [f"folder:{tmp_path / 'store'}", *["ram"] * 5]


def test_an_older_step_can_be_read_beside_the_newest(daemon: Daemon) -> None:
    client = daemon.client()
    for step in (1, 2):
        save(client, make_id(step), make_content(BIG, step))
        wait_for_store(client, step)
    wait_until(lambda: held(client) == [2], client.status)

    for _ in range(5):
        assert load(client, make_id(1)) == make_content(BIG, 1)

    wait_until(lambda: held(client) == [2], client.status)


class Fakes(Peers):
    """Other nodes, each with a shard of one id and perhaps a wrong byte, or gone."""

    def __init__(self, shard: Shard, nodes: Mapping[str, str], bad: Sequence[str] = ()) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.is_known = threading.Event()
        self.lost: set[str] = set()
        self._shard, self._nodes, self._bad = shard, nodes, bad

    def copies(self) -> list[Copy]:
        self.is_known.set()
        return [copy_of(self._shard.meta, node) for node in self._nodes]

    def living(self) -> Mapping[str, str]:
        return self._nodes

    def fetch(self, copy: Copy, into: memoryview, on_piece: OnPiece) -> object:
        self.asked.append(copy.place)
        data = bytearray(self._shard.data)
        if copy.place in self._bad:
            data[-1] ^= 1
        for number, (begin, end) in enumerate(piece_bounds(len(data))):
            if copy.place in self.lost:
                raise LostError("gone in the middle")
            into[begin:end] = data[begin:end]
            on_piece(self._shard.meta, number)
        return self._shard.meta


@contextmanager
def offering(
    tmp_path: Path, peers: Fakes, store: Store | None = None
) -> Iterator[tuple[TieredOffer, Vault]]:
    arena = Arena(tmp_path / "arena", 64 * MIB)
    vault = Vault(arena)
    shelf = Shelf(store, "folder", "disk") if store else None
    own = Node(name="a", domain="rack-1")
    board = Board(vault, own, Settings(), peers=peers, shelf=shelf)  # type: ignore[arg-type]
    vault.on_change = board.wake
    yield TieredOffer(board, Room(board)), vault
    arena.close()


def bring(offer: TieredOffer, shard_id: ShardId) -> tuple[str, bytes]:
    source, reading = offer.bring(shard_id)
    with reading:
        return source, bytes(reading.memory)


def test_sources_are_tried_from_near_to_far(tmp_path: Path) -> None:
    shard = make_shard(num_bytes=BIG)
    store = open_folder(FolderSettings(folder=tmp_path / "store"))
    shard.put(store)
    peers = Fakes(shard, {"b": "rack-1", "c": "rack-2"}, bad=["b"])
    peers.lost.add("c")

    with offering(tmp_path, peers, store) as (offer, vault):
        (step,) = offer.steps("job")
        assert (step.at.step, list(step.copies)) == (1, ["0"])
        assert bring(offer, shard.meta.id) == ("folder:disk", shard.data)
        assert peers.asked == ["b", "c"]
        assert bring(offer, shard.meta.id) == ("ram", shard.data)

        vault.drop(shard.meta.id)
        peers.lost.clear()

        assert bring(offer, shard.meta.id) == ("peer:c", shard.data)
        assert peers.asked == ["b", "c", "c"]


def test_a_step_with_too_few_domains_is_not_offered(tmp_path: Path) -> None:
    shard = make_shard(num_bytes=100)

    with offering(tmp_path, Fakes(shard, {"b": "rack-2"})) as (offer, _):
        assert offer.steps("job") == []
        bring(offer, shard.meta.id)
        assert [each.at.step for each in offer.steps("job")] == [1]


@pytest.mark.parametrize("unheard", [[], ["c", "d"]])
def test_half_a_step_is_no_job_that_never_saved_while_peers_are_unheard(
    tmp_path: Path, unheard: list[str]
) -> None:
    """Who takes an older step, or none, has the newer one dropped that they may know complete."""
    old, half = make_shard(num_bytes=100), make_id(9, name="job")
    peers = Fakes(old, {"b": "rack-2"})
    peers.unheard = lambda: unheard  # type: ignore[method-assign]

    with offering(tmp_path, peers) as (offer, vault):
        bring(offer, old.meta.id)
        assert [each.at.step for each in offer.steps("job")] == [1]
        put(vault, half, num_shards=4)

        if not unheard:
            assert [each.at.step for each in offer.steps("job")] == [1]
            return
        with pytest.raises(TierError, match=r"step 9 .* in part, .* with c, d, not heard"):
            offer.steps("job")
        unheard.clear()
        assert [each.at.step for each in offer.steps("job")] == [1]


@pytest.mark.parametrize("is_brought", [True, False])
def test_a_shard_that_a_peer_is_bringing_is_waited_for(tmp_path: Path, is_brought: bool) -> None:
    shard = make_shard(num_bytes=BIG)
    peers = Fakes(shard, {"b": "rack-1"})

    with offering(tmp_path, peers) as (offer, vault), ThreadPoolExecutor(1) as pool:
        writing = vault.begin(shard.meta.id, BIG)
        brought = pool.submit(bring, offer, shard.meta.id)
        peers.is_known.wait(LIMIT_S)
        writing.memory[:] = shard.data
        if is_brought:
            writing.commit(shard.meta)
        else:
            writing.abort()

        source = "ram" if is_brought else "peer:b"
        assert brought.result(LIMIT_S) == (source, shard.data)


def test_all_copies_bad_leaves_nothing_behind(tmp_path: Path) -> None:
    shard = make_shard(num_bytes=BIG)
    peers = Fakes(shard, {"b": "rack-1", "c": "rack-2"}, bad=["b", "c"])

    with offering(tmp_path, peers) as (offer, vault):
        for _ in range(2):
            with pytest.raises(TierError, match="cannot be had"):
                offer.bring(shard.meta.id)

        assert peers.asked == ["b", "c"]
        assert vault.free_bytes == vault.budget_bytes
        assert vault.metas() == []

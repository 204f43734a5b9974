"""Steps are read from a store by whoever has no daemon that knows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.tiered.errors import TierError
from resilience.tiered.stores.choice import open_as, parse_place
from resilience.tiered.stores.reader import StoreReader
from tests.launcher.shipped import shipped_job
from tests.resilience.tiered.store_places import Place, make_shard


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("folder", {"folder": str(tmp_path / "store")})


def test_steps_are_those_with_shards_newest_first(place: Place) -> None:
    store = place.open()
    for step, generation in ((2, 0), (10, 0), (10, 7)):
        make_shard(step, step=step, generation=generation).put(store)
    make_shard(1, step=11, namespace="another").put(store)

    steps = StoreReader(store, "job", source="x").steps()

    assert [(each.step, each.generation) for each in steps] == [(10, 7), (10, 0), (2, 0)]
    assert {(each.num_shards, each.shards) for each in steps} == {(1, ("0",))}


def test_shard_is_read_with_its_source(place: Place) -> None:
    store = place.open()
    shard = make_shard(3, step=4, num_bytes=100_000)
    shard.put(store)
    reader = StoreReader(store, "job", source="somewhere")

    with reader.read(step=4, generation=0, shard="0") as lent:
        assert bytes(lent.memory) == shard.data
        assert (lent.meta, lent.source) == (shard.meta, "somewhere")
    with pytest.raises(KeyError):
        reader.read(step=5, generation=0, shard="0")


def test_reading_leaves_the_store_as_it_is(place: Place) -> None:
    store = place.open()
    for step in range(5):
        make_shard(step, step=step).put(store)
    root = Path(place.settings["folder"])
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    reader = StoreReader(store, "job", source="x")

    for each in reader.steps():
        reader.read(step=each.step, generation=each.generation, shard="0").bad()

    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_damaged_shard_is_read_once_by_each_who_tries(place: Place) -> None:
    """There is no second copy; what a file server did wrong once may be right later."""
    store = place.open()
    make_shard(3).put(store)
    reader = StoreReader(store, "job", source="x")

    for _ in range(2):
        reader.read(step=1, generation=0, shard="0").bad()
        with pytest.raises(TierError, match="bytes in the store are not what their checksums say"):
            reader.read(step=1, generation=0, shard="0")


def test_store_of_a_url_is_reached_as_a_tier_is(place: Place) -> None:
    shard = make_shard()
    shard.put(place.open())
    tiered = shipped_job("llama/llama3_tiny_pretrain", "local").resilience.tiered
    assert tiered is not None
    assert tiered.store is not None

    assert shard.get(open_as(f"folder:{place.settings['folder']}", tiered.store)) == shard.data
    with pytest.raises(ValueError, match="neither folder:PATH nor s3://BUCKET/PREFIX"):
        parse_place("ftp://x")

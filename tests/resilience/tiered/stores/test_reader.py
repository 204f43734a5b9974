"""Steps are read from a store by whoever has no daemon that knows of them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from resilience.tiered.errors import TierError
from resilience.tiered.shard import ShardId, ShardMeta, content_digest, encode_meta
from resilience.tiered.stores.choice import open_as, parse_place
from resilience.tiered.stores.deadline import DeadlineError
from resilience.tiered.stores.entries import EntryReader
from resilience.tiered.stores.reader import StoreReader
from resilience.tiered.stores.store import Store
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


def spoil(place: Place, step: int, text: bytes | None, *, shard: str = "0") -> None:
    """Write a text in the place of a description, or put a pipe there."""
    root = Path(place.settings["folder"])
    (path,) = (each for each in root.rglob(f"{shard}.*.json") if f"/{step:012}-" in f"{each}")
    path.unlink()
    if text is None:
        os.mkfifo(path)
    else:
        path.write_bytes(text)


@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("text", [None, b"", b"\0" * 99, encode_meta(make_shard(9, step=9).meta)])
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_damaged_description_hides_no_other_step(
    place: Place, bad: int, text: bytes | None, reads_all: bool
) -> None:
    store = place.open()
    for step in (1, 2, 3):
        make_shard(step, step=step).put(store)
    spoil(place, bad, text)
    reader = StoreReader(store, "job", source="x")

    steps = reader.steps(reads_all=reads_all)

    whole = [each.step for each in steps if len(each.shards) == each.num_shards]
    assert whole == [each for each in (3, 2, 1) if each != bad]
    assert [*reader.left_out] == [(bad, 0)]
    # The damaged one goes on to say that older histories are over.
    assert [each.step for each in steps] == [3, 2, 1]


@pytest.mark.parametrize("bad", [1, 3])
@pytest.mark.parametrize("num_bytes", [None, 0, 99, 101])
def test_a_step_without_all_of_its_data_hides_no_other_step(
    place: Place, bad: int, num_bytes: int | None
) -> None:
    store = place.open()
    for step in (1, 2, 3):
        make_shard(step, step=step, num_bytes=100).put(store)
    digest = content_digest(make_shard(bad, step=bad, num_bytes=100).meta)
    data = Path(place.settings["folder"]) / "job" / "data" / digest
    data.unlink()
    if num_bytes is not None:
        data.write_bytes(b"x" * num_bytes)
    reader = StoreReader(store, "job", source="x")

    steps = reader.steps()

    whole = [each.step for each in steps if len(each.shards) == each.num_shards]
    assert whole == [each for each in (3, 2, 1) if each != bad]
    assert reader.left_out == {(bad, 0): "the 100 bytes of shard 0 are not there"}


@pytest.mark.parametrize(("reads_all", "is_whole"), [(True, [False, True]), (False, [True, True])])
def test_a_second_shard_is_looked_at_on_demand(
    place: Place, reads_all: bool, is_whole: list[bool]
) -> None:
    store = place.open()
    for step in (1, 2):
        for shard in "01":
            make_shard(step, step=step, shard=shard, num_shards=2).put(store)
    spoil(place, 2, b"{}", shard="1")

    steps = StoreReader(store, "job", source="x").steps(reads_all=reads_all)

    assert [len(each.shards) == each.num_shards for each in steps] == is_whole


BAD = TierError("no description of a shard")
HUNG = DeadlineError("no answer")


def failed() -> TierError:
    error = TierError("Input/output error")
    error.__cause__ = OSError(5, "Input/output error")
    return error


@pytest.mark.parametrize(
    ("answers", "left_out", "raises"),
    [
        pytest.param([BAD] * 5 + [None], 5, False, id="damaged-entries"),
        pytest.param([failed(), None, failed(), failed(), None], 3, False, id="some-unreadable"),
        pytest.param([None, failed(), failed(), failed()], 2, True, id="a-store-that-fails"),
        pytest.param([failed(), BAD, failed(), BAD, failed()], 4, True, id="between-damaged-ones"),
        pytest.param([HUNG], 0, True, id="a-store-that-hangs"),
    ],
)
def test_an_entry_that_cannot_be_read_is_told_from_a_store_that_fails(
    answers: list[TierError | None], left_out: int, raises: bool
) -> None:
    told: list[TierError] = []
    entries = EntryReader(Answering(answers), lambda _, error: told.append(error))
    shard_id = make_shard().meta.id

    with pytest.raises(TierError) if raises else nullcontext():
        for _ in answers:
            entries.read(shard_id)

    assert len(told) == left_out


class Answering(Store):
    def __init__(self, answers: list[TierError | None]) -> None:
        self._answers = iter(answers)

    def get_meta(self, id: ShardId) -> ShardMeta | None:  # noqa: A002
        if (error := next(self._answers)) is not None:
            raise error
        return make_shard().meta


def test_a_store_of_which_nothing_can_be_read_is_not_an_empty_one(place: Place) -> None:
    store = place.open()
    for step in (1, 2):
        make_shard(step, step=step).put(store)
        spoil(place, step, b"{}")

    with pytest.raises(TierError, match="no description of a shard"):
        StoreReader(store, "job", source="x").steps()


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

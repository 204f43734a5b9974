"""What every store has to do, over a folder and over a real server of S3's protocol."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience.tiered.errors import TierError
from resilience.tiered.paths import data_key, data_prefix, steps_prefix
from resilience.tiered.shard import PIECE_BYTES, ShardId
from resilience.tiered.stores.store import Store
from tests.resilience.rank_processes import CONTEXT, PRELOADED
from tests.resilience.tiered.s3_server import S3Server
from tests.resilience.tiered.store_places import (
    Place,
    big_shard,
    make_shard,
    s3_place,
    write_forever,
)

FEW = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place("folder", {"folder": str(tmp_path / "share")})
    server: S3Server = request.getfixturevalue("server")
    return s3_place(server)


@pytest.fixture
def store(place: Place) -> Store:
    return place.open()


def test_nothing_is_there_before_anything_is_put(store: Store) -> None:
    shard = make_shard()

    assert store.list_steps("job") == []
    assert store.get_meta(shard.meta.id) is None
    store.delete_step("job", 1, 0)
    with pytest.raises(TierError, match=rf"reading .*{shard.digest}"):
        shard.get(store)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_what_was_put_is_read_by_another_store(place: Place, num_bytes: int) -> None:
    shard = make_shard(num_bytes=num_bytes)

    is_sent = shard.put(place.open())

    other = place.open()
    assert is_sent == bool(num_bytes)
    assert other.list_steps("job") == [shard.meta.id]
    assert other.get_meta(shard.meta.id) == shard.meta
    assert shard.get(other) == shard.data


@pytest.mark.parametrize(
    ("begin", "num_bytes"),
    [(0, 10), (0, 0), (PIECE_BYTES - 3, 7), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES + 4, 1)],
)
def test_a_part_of_the_data_is_read(store: Store, begin: int, num_bytes: int) -> None:
    shard = make_shard(num_bytes=2 * PIECE_BYTES + 5)
    shard.put_data(store)
    into = bytearray(num_bytes + 2)

    part = memoryview(into)[1:-1]
    store.get_data("job", shard.digest, len(shard.data), part, begin=begin)

    assert into == b"\0" + shard.data[begin : begin + num_bytes] + b"\0"
    with pytest.raises(ValueError, match="bytes from 9 on are not in 10"):
        store.get_data("job", "0" * 32, 10, memoryview(bytearray(2)), begin=9)


def test_data_counts_only_with_its_entry(store: Store) -> None:
    shard = make_shard()

    with pytest.raises(TierError, match="is not there with 1000 bytes"):
        store.put_meta(shard.meta)
    shard.put_data(store)

    assert store.list_steps("job") == []
    assert store.get_meta(shard.meta.id) is None


def test_data_that_is_there_is_not_asked_for(store: Store) -> None:
    shard = make_shard()

    def never() -> Iterator[memoryview]:
        raise AssertionError
        yield

    assert shard.put(store)
    assert not store.put_data("job", shard.digest, len(shard.data), never())
    assert store.put_data("other", shard.digest, len(shard.data), shard.pieces())


@pytest.mark.parametrize(
    ("announced", "match"),
    [
        pytest.param(999, "more than the 999 bytes that were announced", id="too-many"),
        pytest.param(1001, "1000 bytes of the 1001 that were announced", id="too-few"),
    ],
)
def test_other_sizes_than_announced_leave_nothing(place: Place, announced: int, match: str) -> None:
    shard = make_shard()

    with pytest.raises(TierError, match=match):
        place.open().put_data("job", shard.digest, announced, shard.pieces())

    assert place.objects().find_all("") == []


def test_pieces_that_fail_leave_nothing(place: Place) -> None:
    shard = big_shard()

    def pieces() -> Iterator[memoryview]:
        yield shard.pieces()[0]
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        place.open().put_data("job", shard.digest, len(shard.data), pieces())

    assert place.objects().find_all("") == []


def test_data_of_another_size_is_no_data(place: Place) -> None:
    shard = make_shard()
    name = data_key("job", shard.digest)
    place.objects().write(name, 3, [memoryview(b"abc")])
    store = place.open()

    with pytest.raises(TierError, match="3 bytes there, 1000"):
        shard.get(store)
    assert shard.put(store)
    assert shard.get(store) == shard.data


def test_nobody_sees_half_of_the_data(place: Place) -> None:
    shard = big_shard()
    reader = place.open()

    def pieces() -> Iterator[memoryview]:
        for each in shard.pieces():
            yield each
            assert reader._objects.find(data_key("job", shard.digest)) is None
            with pytest.raises(TierError):
                shard.get(reader)

    place.open().put_data("job", shard.digest, len(shard.data), pieces())

    assert shard.get(reader) == shard.data


def test_any_name_of_a_shard_is_kept(place: Place, store: Store) -> None:
    names = ("", ".", "..", "../x", "/etc", "1", "1/2", "a b%2F\n", "\u00fcn\u00ef", "-._")
    shards = [make_shard(1, shard=each) for each in names]
    shards += [make_shard(2, shard=f"{each}0", generation=-3) for each in names]
    for each in shards:
        each.put(store)

    assert store.list_steps("job") == sorted(each.meta.id for each in shards)
    assert all(store.get_meta(each.meta.id) == each.meta for each in shards)
    assert all(each.name.startswith("job/") for each in place.objects().find_all(""))


def test_a_namespace_does_not_leave_its_place(store: Store) -> None:
    namespace = "../job"
    with pytest.raises(ValueError, match=r"namespace .* is not allowed"):
        make_shard(namespace=namespace).put(store)
    with pytest.raises(ValueError, match=r"namespace .* is not allowed"):
        store.list_steps(namespace)


def test_a_deleted_step_takes_the_data_that_only_it_names(place: Place) -> None:
    store = place.open()
    shared = [make_shard(1, step=step) for step in (1, 2)]
    own = [make_shard(9 + step, step=step, shard="1") for step in (1, 2)]
    other_generation = make_shard(30, step=1, generation=5)
    elsewhere = make_shard(9 + 1, namespace="job2", step=1)
    kept = [shared[1], own[1], other_generation]
    for each in [*shared, *own, other_generation, elsewhere]:
        each.put(store)

    store.delete_step("job", 1, 0)
    store.delete_step("job", 1, 0)

    assert store.list_steps("job") == sorted(each.meta.id for each in kept)
    assert [each.get(store) for each in kept] == [each.data for each in kept]
    names = {each.name for each in place.objects().find_all(data_prefix("job"))}
    assert names == {data_key("job", each.digest) for each in kept}
    assert elsewhere.get(store) == elsewhere.data


def test_a_deletion_spares_what_is_about_to_be_named(place: Place) -> None:
    store, shard = place.open(), make_shard(1, step=1)
    shard.put(store)

    assert store.delete_step("job", 1, 0, spare={shard.digest}) == set()

    assert store.list_steps("job") == []
    assert shard.get(store) == shard.data


def test_a_deletion_says_what_was_named_while_its_data_went(place: Place) -> None:
    old, new = make_shard(1, step=1), make_shard(1, step=2)
    old.put(place.open())
    objects = place.objects()
    deletes = objects.delete

    def name_first(names: Sequence[str]) -> None:
        if data_key("job", new.digest) in names:
            assert not new.put_data(place.open())
            place.open().put_meta(new.meta)
        deletes(names)

    objects.delete = name_first  # type: ignore[method-assign]
    assert Store(objects).delete_step("job", 1, 0) == {new.digest}

    assert place.open().list_steps("job") == []


def test_data_without_an_entry_goes_when_it_is_old(place: Place) -> None:
    young, used = make_shard(1), make_shard(2, step=2)
    young.put_data(place.open())
    used.put(place.open())

    place.open().delete_step("job", 7, 0)
    assert young.get(place.open()) == young.data

    Store(place.objects(), orphan_s=-3600).delete_step("job", 7, 0)

    assert [each.name for each in place.objects().find_all(data_prefix("job"))] == [
        data_key("job", used.digest)
    ]


def test_what_else_lies_there_is_left_alone(place: Place) -> None:
    store, objects = place.open(), place.objects()
    shard = make_shard()
    shard.put(store)
    foreign = ["job/steps/notes.txt", "job/steps/000000000001-g0/x.json", "job/data/readme"]
    for name in foreign:
        objects.write(name, 1, [memoryview(b"x")])
    if place.kind == "folder":
        foreign.append("job/drafts/pipe")
        os.mkfifo(Path(place.settings["folder"]) / foreign[-1])

    assert store.list_steps("job") == [shard.meta.id]
    store.delete_step("job", 1, 0)

    assert {each.name for each in objects.find_all("job/")} == set(foreign)


def test_an_entry_that_cannot_be_read_is_an_error(place: Place) -> None:
    store, objects = place.open(), place.objects()
    shard, other = make_shard(), make_shard(2, shard="other")
    for each in (shard, other):
        each.put(store)
    mine, its = sorted(each.name for each in objects.find_all(steps_prefix("job")))
    text = bytearray(next(each.num_bytes for each in objects.find_all(its)))
    objects.read(its, len(text), 0, memoryview(text))

    objects.write(mine, 2, [memoryview(b"[]")])
    with pytest.raises(TierError, match="no description of a shard"):
        store.get_meta(shard.meta.id)

    objects.write(mine, len(text), [memoryview(text)])
    with pytest.raises(TierError, match="describes another shard"):
        store.get_meta(shard.meta.id)


def test_two_writers_of_the_same_bytes(place: Place) -> None:
    shard = big_shard()
    gate = threading.Barrier(2)
    results: list[bool] = []

    def pieces() -> Iterator[memoryview]:
        gate.wait(60)
        yield from shard.pieces()

    def write() -> None:
        store = place.open()
        results.append(store.put_data("job", shard.digest, len(shard.data), pieces()))
        store.put_meta(shard.meta)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert results == [True] * 2
    assert len(place.objects().find_all("")) == 2
    assert shard.get(place.open()) == shard.data


def test_a_killed_writer_leaves_nothing_that_counts(place: Place) -> None:
    CONTEXT.set_forkserver_preload(PRELOADED)
    told, tells = CONTEXT.Pipe()
    writer = CONTEXT.Process(target=write_forever, args=(place, tells))
    writer.start()
    assert told.recv() == "half"
    store = place.open()
    store.delete_step("job", 1, 0)
    assert _drafts(place) == (1 if place.kind == "folder" else 0)
    writer.kill()
    writer.join()

    assert store.list_steps("job") == []
    with pytest.raises(TierError):
        big_shard().get(store)
    store.delete_step("job", 1, 0)
    assert _drafts(place) == 0
    assert big_shard().put(store)
    assert big_shard().get(store) == big_shard().data


def _drafts(place: Place) -> int:
    return len(list(Path(place.settings.get("folder", "none")).glob("*/drafts/*")))


PUTS = st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 3))
DELETES = st.tuples(st.integers(0, 2), st.integers(0, 1))


@FEW
@given(actions=st.lists(st.one_of(PUTS, DELETES), max_size=12))
def test_any_puts_and_deletions_leave_what_a_dict_has(
    place: Place, actions: list[tuple[int, ...]]
) -> None:
    store = place.open()
    for each in {(found.step, found.generation) for found in store.list_steps("job")}:
        store.delete_step("job", *each)
    model: dict[ShardId, int] = {}

    for each in actions:
        if len(each) == 2:
            step, generation = each
            store.delete_step("job", step, generation)
            model = {at: seed for at, seed in model.items() if (at.step, at.generation) != each}
            continue
        step, generation, number, seed = each
        shard = make_shard(seed, step=step, generation=generation, shard=str(number))
        shard.put(store)
        model[shard.meta.id] = seed

    assert store.list_steps("job") == sorted(model)
    for at, seed in model.items():
        meta = store.get_meta(at)
        assert meta is not None
        assert meta.rest == {"seed": seed}
        assert make_shard(seed).get(store) == make_shard(seed).data

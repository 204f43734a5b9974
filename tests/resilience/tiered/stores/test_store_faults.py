"""Stores on bad days: the result is whole and right, or a TierError within the deadline."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.errors import TierError
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.paths import data_key
from resilience.tiered.shard import PIECE_BYTES
from resilience.tiered.stores.deadline import HUNG_MAX, HUNG_RETRY_S, DeadlineError, Hung
from resilience.tiered.stores.folder import FolderObjects, FolderSettings
from resilience.tiered.stores.objects import Stored
from resilience.tiered.stores.s3 import S3Settings
from resilience.tiered.stores.store import Store
from tests.resilience.tiered.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.resilience.tiered.s3_server import S3Server
from tests.resilience.tiered.store_places import Place, Shard, big_shard, make_shard, s3_place
from tests.waiting import wait_until


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as between:
        yield between


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return Place("folder", {"folder": str(tmp_path / "share")})


FAULTS: dict[str, dict[str, Any]] = {
    "refused": {"kind": "refuse"},
    "500": {"kind": "status", "status": 500},
    "503": {"kind": "status", "status": 503},
    "cut-while-sending": {"kind": "cut_up", "after_bytes": 2 << 20},
    "cut-before-the-answer": {"kind": "cut_down"},
    "cut-while-reading": {"kind": "cut_down", "after_bytes": 2 << 20},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_s3_that_fails_leaves_nothing_or_all(
    server: S3Server, proxy: FaultProxy, fault: str
) -> None:
    direct = s3_place(server)
    store = _through(direct, proxy, attempts=2)
    there, new = (
        make_shard(1, step=1, num_bytes=2 * PIECE_BYTES),
        make_shard(2, num_bytes=PIECE_BYTES, step=2),
    )
    there.put(direct.open())

    proxy.begin(Fault(**FAULTS[fault]))
    is_put = _succeeds(lambda: new.put(store))
    is_read = _succeeds(lambda: _check(there, store))
    proxy.end()

    assert not (is_put and is_read), "the fault did not happen"
    steps = direct.open().list_steps("job")
    # Where only the answer to the last request was lost, it was done all the same.
    both = [there.meta.id, new.meta.id]
    assert steps in ([both] if is_put else [both, both[:1]])
    found = direct.objects().find(data_key("job", new.digest))
    assert found is None or found.num_bytes == len(new.data)
    new.put(store)
    for each in (there, new):
        _check(each, store)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_s3_that_fails_once_is_asked_again(server: S3Server, proxy: FaultProxy, fault: str) -> None:
    store = _through(s3_place(server), proxy, attempts=5)
    shard = make_shard(3, num_bytes=PIECE_BYTES + 1)

    proxy.begin(Fault(**FAULTS[fault], times=1))
    shard.put(store)
    proxy.begin(Fault(**FAULTS[fault], times=1))
    _check(shard, store)
    proxy.begin(Fault(**FAULTS[fault], times=1))
    assert store.list_steps("job") == [shard.meta.id]
    proxy.begin(Fault(**FAULTS[fault], times=1))
    store.delete_step("job", 1, 0)

    assert store.list_steps("job") == []


@pytest.mark.parametrize("operation", ["put_data", "put_meta", "get_data", "list", "delete"])
def test_s3_that_hangs_ends_at_the_deadline(
    server: S3Server, proxy: FaultProxy, operation: str
) -> None:
    place = s3_place(server)
    shard, new = make_shard(1), make_shard(2, step=2)
    shard.put(place.open())
    store = _through(place, proxy, deadline_s=0.5)
    calls: dict[str, Callable[[], object]] = {
        "put_data": lambda: new.put_data(store),
        "put_meta": lambda: store.put_meta(shard.meta),
        "get_data": lambda: shard.get(store),
        "list": lambda: store.list_steps("job"),
        "delete": lambda: store.delete_step("job", 1, 0),
    }

    proxy.begin(Fault("hang"))
    with pytest.raises(DeadlineError, match=r"s3://bucket.*: no answer within 0\.5\d* s"):
        calls[operation]()
    proxy.end()

    patient = _through(place, proxy)
    new.put(patient)
    _check(new, patient)


@pytest.mark.slow
def test_s3_that_hangs_in_the_middle_of_an_upload(server: S3Server, proxy: FaultProxy) -> None:
    place = s3_place(server)
    store = _through(place, proxy, deadline_s=1.0)
    shard = big_shard()

    def pieces() -> Iterator[memoryview]:
        first, *others = shard.pieces()
        yield first
        proxy.begin(Fault("hang"))
        yield from others

    with pytest.raises(TierError):
        store.put_data("job", shard.digest, len(shard.data), pieces())
    proxy.end()

    # What was sent before may still be completed by the thread that was left behind.
    assert all(each.num_bytes == len(shard.data) for each in place.objects().find_all(""))


def test_a_bucket_that_is_not_there(server: S3Server) -> None:
    store = s3_place(server, bucket="nobodys").open()

    with pytest.raises(TierError, match=r"listing s3://nobodys.*bucket does not exist"):
        store.list_steps("job")
    with pytest.raises(TierError, match="nobodys"):
        make_shard().put(store)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"bucket": ""}, "bucket"),
        ({"endpoint": "localhost:9000"}, "http"),
        ({"endpoint": "http://"}, "http"),
        ({"part_size_mib": 4}, "part_size_mib 4"),
        ({"attempts": 0}, "attempts"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_settings_of_s3_that_cannot_be(changed: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        S3Settings(**{"bucket": "b", **changed})  # type: ignore[arg-type]


def test_a_full_disk_leaves_nothing(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, store = big_shard(), folder.open()
    write, written = os.write, 0

    def write_little(file: int, data: memoryview) -> int:
        nonlocal written
        if written > PIECE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += (size := write(file, data[: 1 << 20]))
        return size

    monkeypatch.setattr(os, "write", write_little)
    with pytest.raises(TierError, match=r"writing .*No space left on device"):
        shard.put_data(store)
    monkeypatch.undo()

    assert _files(folder) == []
    assert shard.put(store)
    _check(shard, store)


def test_a_disk_that_is_not_mounted_is_not_an_empty_one(tmp_path: Path) -> None:
    place = Place("folder", {"folder": str(tmp_path / "mount" / "share")})

    with pytest.raises(TierError, match="No such file or directory"):
        place.open().list_steps("job")
    with pytest.raises(TierError, match="No such file or directory"):
        make_shard().put(place.open())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mount").touch()
    with pytest.raises(TierError, match=r"writing .*Not a directory"):
        make_shard().put(place.open())


def test_a_share_that_hangs_ends_in_time(folder: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = folder.open(deadline_s=0.1)._objects
    path = Path(folder.settings["folder"]) / "file"
    path.parent.mkdir()
    path.touch()
    answers = threading.Event()
    monkeypatch.setattr(os, "fstat", lambda file, stat=os.fstat: answers.wait() and stat(file))

    for _ in range(HUNG_MAX):
        with pytest.raises(DeadlineError, match=r"reading .*file: no answer within 0\.1\d* s"):
            objects.read("file", 1, 0, memoryview(bytearray(1)))
    with pytest.raises(TierError, match=f"{HUNG_MAX} earlier calls hang still"):
        objects.find_all("")

    answers.set()
    wait_until(lambda: _succeeds(lambda: objects.find_all("")))


class Interrupted(FolderObjects):
    """A folder where somebody else comes in between."""

    def __init__(self, place: Place, at: str, other: Callable[[], object]) -> None:
        super().__init__(FolderSettings(folder=Path(place.settings["folder"])))
        self._at = at
        self._other: Callable[[], object] | None = other

    def write(self, name: str, num_bytes: int, pieces: object) -> None:
        super().write(name, num_bytes, pieces)  # type: ignore[arg-type]
        self._come("entry written" if "/steps/" in name else "data written")

    def delete(self, names: Sequence[str]) -> None:
        super().delete(names)
        if names:
            self._come("entry deleted" if "/steps/" in names[0] else "data deleted")

    def find_all(self, prefix: str) -> list[Stored]:
        found = super().find_all(prefix)
        if "/data/" in prefix:
            self._come("data listed")
        return found

    def _come(self, at: str) -> None:
        if at == self._at and self._other is not None:
            other, self._other = self._other, None
            other()


@pytest.mark.parametrize("at", ["data written", "entry written"])
def test_a_deletion_within_a_put_is_seen_by_the_put(folder: Place, at: str) -> None:
    old, new = make_shard(1, step=1), make_shard(1, step=2)
    old.put(folder.open())
    name = data_key("job", old.digest)
    store = Store(Interrupted(folder, at, lambda: folder.objects().delete([name])))

    if at == "entry written":
        with pytest.raises(TierError, match="was deleted while its entry was written"):
            new.put(store)
        assert new.meta.id not in folder.open().list_steps("job")
    new.put(store)

    _check(new, folder.open())


@pytest.mark.parametrize("at", ["entry deleted", "data listed", "data deleted"])
def test_a_put_within_a_deletion_is_whole_or_gone(folder: Place, at: str) -> None:
    old, new = make_shard(1, step=1), make_shard(1, step=2)
    old.put(folder.open())
    store = Store(Interrupted(folder, at, lambda: new.put(folder.open())))

    store.delete_step("job", 1, 0)

    for each in folder.open().list_steps("job"):
        meta = folder.open().get_meta(each)
        assert meta == new.meta
        _check(new, folder.open())
    new.put(folder.open())
    _check(new, folder.open())


def _through(place: Place, proxy: FaultProxy, **changed: object) -> Store:
    return place.open(endpoint=proxy.endpoint, **changed)


def _check(shard: Shard, store: Store) -> None:
    assert store.get_meta(shard.meta.id) == shard.meta
    assert shard.get(store) == shard.data


def _succeeds(act: Callable[[], object]) -> bool:
    """Return whether it was done; any failure but TierError is one of the test."""
    try:
        act()
    except TierError:
        return False
    return True


def _files(place: Place) -> list[Path]:
    return [each for each in Path(place.settings["folder"]).rglob("*") if each.is_file()]


def test_calls_that_never_end_do_not_refuse_a_store_for_good() -> None:
    now_s = [0.0]
    hung = Hung(clock=lambda: now_s[0])
    ends = [hung.begin() for _ in range(HUNG_MAX)]
    with pytest.raises(TierError, match="earlier calls hang still"):
        hung.check("reading")
    now_s[0] = HUNG_RETRY_S
    hung.check("reading")
    with pytest.raises(TierError, match="earlier calls hang still"):
        hung.check("a second one at once")

    hung.pardon()
    hung.check("reading, as the store answers again")
    for each in ends:
        each()
    for _ in range(HUNG_MAX):
        hung.begin()
    with pytest.raises(TierError, match="earlier calls hang still"):
        hung.check("those that were pardoned count neither when they end")


def test_a_listing_without_a_thread_is_made_by_the_next_one(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(folder.open(), "folder", "disk")
    with monkeypatch.context() as patch:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TierError, match="cannot be listed: can't start new thread"):
            shelf.look("job", timeout_s=1.0)

    shelf.look("job", timeout_s=60.0)
    assert shelf.is_listed("job")

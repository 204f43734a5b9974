"""Whose a namespace of a store is, whoever comes at the same time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import RefusedError, TierError
from resilience.tiered.stores.folder import FolderObjects, FolderSettings
from resilience.tiered.stores.objects import Stored
from resilience.tiered.stores.owner import NamespaceOwner, claim_namespace
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.news_reader import Reader

A, B = NamespaceOwner(run="a" * 32, name="run a"), NamespaceOwner(run="b" * 32, name="run b")


@pytest.fixture
def objects(tmp_path: Path) -> FolderObjects:
    return FolderObjects(FolderSettings(folder=tmp_path / "store"))


def claim(
    objects: FolderObjects, owner: NamespaceOwner, *, takes_over: bool = False
) -> tuple[NamespaceOwner, ...]:
    return claim_namespace(objects, "n", owner, takes_over=takes_over)


def owners(objects: FolderObjects) -> list[str]:
    return sorted(each.name for each in objects.find_all("n/owner/"))


def test_a_namespace_is_its_first_runs_over_all_its_starts(objects: FolderObjects) -> None:
    assert claim(objects, A) == ()
    assert claim(objects, A) == ()
    assert claim(objects, B) == (A,)
    assert claim(objects, A) == ()
    assert owners(objects) == [f"n/owner/{A.run}.json"]


def test_a_run_that_takes_over_is_the_only_owner(objects: FolderObjects) -> None:
    claim(objects, A)

    assert claim(objects, B, takes_over=True) == ()
    assert claim(objects, A) == (B,)
    assert owners(objects) == [f"n/owner/{B.run}.json"]


def test_another_namespace_is_nobodys(objects: FolderObjects) -> None:
    claim(objects, A)

    assert claim_namespace(objects, "m", B, takes_over=False) == ()


class Between(FolderObjects):
    """A store where another run comes after some writes."""

    def __init__(self, folder: Path, other: NamespaceOwner, after: int) -> None:
        super().__init__(FolderSettings(folder=folder))
        self.other, self.left = other, after
        self.found: tuple[NamespaceOwner, ...] | None = None

    def write(self, name: str, num_bytes: int, pieces: object) -> None:
        super().write(name, num_bytes, pieces)  # type: ignore[arg-type]
        self.come()

    def find_all(self, prefix: str) -> list[Stored]:
        found = super().find_all(prefix)
        self.come()
        return found

    def come(self) -> None:
        self.left -= 1
        if self.left == 0:
            plain = FolderObjects(self._settings)
            self.found = claim_namespace(plain, "n", self.other, takes_over=False)


@pytest.mark.parametrize("after", range(1, 6))
def test_of_two_that_come_at_once_one_has_it_at_most(tmp_path: Path, after: int) -> None:
    objects = Between(tmp_path / "store", B, after)

    mine = claim(objects, A)

    has_a, has_b = mine == (), objects.found == ()
    assert has_a + has_b <= 1
    assert {f"n/owner/{A.run}.json"} if has_a else set() <= set(owners(objects))
    # Who has it keeps it, and who has given way leaves nothing that keeps others out for ever.
    if has_a:
        assert claim(objects, A) == ()
        assert claim(objects, B) == (A,)
    if has_b:
        assert claim(objects, B) == ()


def test_many_threads_at_once_give_one_owner_at_most(objects: FolderObjects) -> None:
    runs = [NamespaceOwner(run=f"{number:032x}", name=f"run {number}") for number in range(8)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: claim(objects, each), runs))

    winners = [run for run, others in zip(runs, found, strict=True) if not others]
    assert len(winners) <= 1
    assert owners(objects) == [f"n/owner/{each.run}.json" for each in winners]


def test_a_run_that_was_killed_between_the_two_owns_nothing(objects: FolderObjects) -> None:
    content = B.model_dump_json().encode()
    objects.write(f"n/owner/{B.run}.wants.json", len(content), [memoryview(content)])

    assert claim(objects, A) == (B,)
    assert claim(objects, B) == ()


def test_an_entry_that_is_torn_keeps_others_out_by_its_name(objects: FolderObjects) -> None:
    objects.write(f"n/owner/{A.run}.json", 1, [memoryview(b"{")])

    (found,) = claim(objects, B)

    assert found.name == f"n/owner/{A.run}.json"


@contextmanager
def daemon(tmp_path: Path, name: str) -> Iterator[Daemon]:
    options = ("--store", f"folder:{tmp_path / 'store'}", "--store-deadline-s", "5")
    with Daemon(folder=tmp_path / name, options=options).start() as started:
        yield started


def own(daemon: Daemon, run: str, *, takes_over: bool = False) -> None:
    with TieredClient(daemon.socket_path, namespace="n", job=run) as client:
        client.own(run=run, name=f"{run} in /some/folder", takes_over=takes_over)


def test_a_daemon_names_the_run_that_has_the_namespace(tmp_path: Path) -> None:
    with daemon(tmp_path, "a") as first, daemon(tmp_path, "b") as second:
        own(first, "first")
        own(first, "first")

        with pytest.raises(RefusedError) as caught:
            own(second, "second")

        assert str(caught.value) == (
            f"the namespace 'n' of the store folder:{tmp_path / 'store'} belongs to first in "
            "/some/folder (run first)"
        )
        own(second, "second", takes_over=True)
    (entry,) = (tmp_path / "store" / "n" / "owner").iterdir()
    assert json.loads(entry.read_text())["run"] == "second"


def test_a_store_that_fails_says_so(tmp_path: Path) -> None:
    with daemon(tmp_path, "a") as first:
        Reader(first).wait_for(trial="")
        (tmp_path / "store").rmdir()
        (tmp_path / "store").write_bytes(b"")

        with pytest.raises(TierError, match="Not a directory"):
            own(first, "first")

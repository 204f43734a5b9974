"""Whose a namespace of a store is, whoever comes at the same time."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.agent.evidence.locks import hold_lock
from resilience.node_config import RunConfig
from resilience.run_record import open_record
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import RefusedError, TierError
from resilience.tiered.stores.folder import FolderObjects, FolderSettings
from resilience.tiered.stores.objects import Stored
from resilience.tiered.stores.owner import NamespaceOwner, claim_namespace
from tests.resilience.tiered.daemons import Daemon, make_content, make_id, save
from tests.resilience.tiered.news_reader import Reader

A, B = NamespaceOwner(run="a" * 32, name="run a"), NamespaceOwner(run="b" * 32, name="run b")


@pytest.fixture
def objects(tmp_path: Path) -> FolderObjects:
    return FolderObjects(FolderSettings(folder=tmp_path / "store"))


def claim(
    objects: FolderObjects, owner: NamespaceOwner, *, takes_over: bool = False
) -> tuple[NamespaceOwner, ...]:
    return claim_namespace(objects, "n", owner, takes_over=takes_over, pause=lambda _: pause(0.01))


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def owners(objects: FolderObjects) -> list[str]:
    return sorted(each.name for each in objects.find_all("n/owner/"))


def test_a_namespace_is_its_first_runs_until_another_one_takes_it_over(
    objects: FolderObjects,
) -> None:
    assert claim(objects, A) == ()
    assert claim(objects, A) == ()
    assert claim(objects, B) == (A,)
    assert claim(objects, A) == ()
    assert owners(objects) == [f"n/owner/{A.run}.json"]
    assert claim_namespace(objects, "another", B, takes_over=False) == ()

    assert claim(objects, B, takes_over=True) == ()
    assert claim(objects, A) == (B,)
    assert owners(objects) == [f"n/owner/{B.run}.json"]


class Turns:
    """Objects in memory of which each call waits for its caller's turn."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._changed = threading.Condition()
        self._over: set[int] = set()
        self.objects: dict[str, Stored] = {}
        self.contents: dict[str, bytes] = {}

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_turn(number), 10.0)
            yield
            if self._order:
                self._order.pop(0)
            self._changed.notify_all()

    def _is_turn(self, number: int) -> bool:
        while self._order and self._order[0] in self._over:
            self._order.pop(0)
        return not self._order or self._order[0] == number

    def end(self, number: int) -> None:
        with self._changed:
            self._over.add(number)
            self._changed.notify_all()


class Turned:
    """One caller's view of them."""

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns, self._number = turns, number

    def write(self, name: str, num_bytes: int, pieces: Iterable[memoryview]) -> None:
        with self._turns.turn(self._number):
            self._turns.contents[name] = b"".join(bytes(each) for each in pieces)
            self._turns.objects[name] = Stored(name, num_bytes, 1.0)

    def read(self, name: str, num_bytes: int, begin: int, into: memoryview) -> None:
        with self._turns.turn(self._number):
            if name not in self._turns.contents:
                raise TierError(name)
            into[:] = self._turns.contents[name][begin : begin + into.nbytes]

    def find(self, name: str) -> Stored | None:
        with self._turns.turn(self._number):
            return self._turns.objects.get(name)

    def find_all(self, prefix: str) -> list[Stored]:
        with self._turns.turn(self._number):
            return [each for name, each in self._turns.objects.items() if name.startswith(prefix)]

    def delete(self, names: Sequence[str]) -> None:
        with self._turns.turn(self._number):
            for each in names:
                self._turns.objects.pop(each, None)
                self._turns.contents.pop(each, None)

    def clean(self, namespace: str) -> None:
        """Nothing: a write here leaves no draft."""


def play(
    order: Sequence[int],
    takes_over: Sequence[bool],
    before: NamespaceOwner | None,
    alive: Sequence[NamespaceOwner] = (),
) -> tuple[list[bool], list[str]]:
    """Return which of two runs got the namespace, and who owns it afterwards."""
    turns = Turns(order)
    if before is not None:
        name = f"n/owner/{before.run}.json"
        turns.contents[name] = before.model_dump_json().encode()
        turns.objects[name] = Stored(name, len(turns.contents[name]), 1.0)

    def run(number: int) -> bool:
        try:
            return not claim_namespace(
                Turned(turns, number),
                "n",
                (A, B)[number],
                takes_over=takes_over[number],
                lives=lambda other: other in alive,
                pause=lambda _: pause(0.002),
            )
        finally:
            turns.end(number)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, range(2)))
    return found, sorted(turns.objects)


@pytest.mark.parametrize("before", [None, NamespaceOwner(run="c" * 32, name="run c")])
@pytest.mark.parametrize("takes_over", list(itertools.product([False, True], repeat=2)))
def test_in_every_order_of_two_runs_one_has_the_namespace(
    takes_over: tuple[bool, bool], before: NamespaceOwner | None
) -> None:
    for first in itertools.combinations(range(10), 5):
        order = [0 if number in first else 1 for number in range(10)]

        found, left = play(order, takes_over, before)

        owned = [each for each in left if not each.endswith(".wants.json")]
        names = [f"n/owner/{each.run}.json" for each in (A, B)]
        winners = [name for name, has_it in zip(names, found, strict=True) if has_it]
        # Who may not take over may stand in the way of who may.
        assert winners or (before is not None and not all(takes_over)), order
        if not winners:
            # Nobody got it, and nobody has lost it.
            assert before, order
            assert owned == [f"n/owner/{before.run}.json"], order
        elif len(winners) == 1:
            assert owned == winners, order
        else:
            # One had it, and the other one has taken it over.
            assert len(owned) == 1, order
            assert takes_over[names.index(owned[0])], order
        assert left == owned, order


def test_of_two_that_take_over_at_once_none_loses_what_it_got() -> None:
    ended = NamespaceOwner(run="c" * 32, name="run c")
    for first in itertools.combinations(range(10), 5):
        order = [0 if number in first else 1 for number in range(10)]

        found, left = play(order, (True, True), ended, alive=(A, B))

        (winner,) = (each for each, has_it in zip((A, B), found, strict=True) if has_it)
        assert left == [f"n/owner/{winner.run}.json"], order


def test_many_threads_at_once_give_one_owner(objects: FolderObjects) -> None:
    runs = [NamespaceOwner(run=f"{number:032x}", name=f"run {number}") for number in range(8)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: claim(objects, each), runs))

    winners = [run for run, others in zip(runs, found, strict=True) if not others]
    assert owners(objects) == [f"n/owner/{each.run}.json" for each in winners]
    assert len(winners) == 1


@pytest.mark.parametrize(("age_s", "others"), [(1.0, (B,)), (3600.0, ())])
def test_what_a_run_that_was_killed_has_wanted_counts_for_a_while(
    objects: FolderObjects, tmp_path: Path, age_s: float, others: tuple[NamespaceOwner, ...]
) -> None:
    content = B.model_dump_json().encode()
    objects.write(f"n/owner/{B.run}.wants.json", len(content), [memoryview(content)])
    path = tmp_path / "store" / "n" / "owner" / f"{B.run}.wants.json"
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)

    assert claim(objects, A) == others
    assert claim(objects, B) == (() if others else (A,))


def test_a_run_waits_for_one_that_is_about_to_give_way(objects: FolderObjects) -> None:
    """That one has seen it, or is to see it."""
    content = B.model_dump_json().encode()
    wanted = f"n/owner/{B.run}.wants.json"
    objects.write(wanted, len(content), [memoryview(content)])

    found = claim_namespace(
        objects, "n", A, takes_over=False, pause=lambda _: objects.delete([wanted])
    )

    assert found == ()
    assert owners(objects) == [f"n/owner/{A.run}.json"]


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


def test_a_daemon_takes_no_namespace_from_a_run_that_lives(tmp_path: Path) -> None:
    config = RunConfig(recipe="llama/x", version=1, digest="d" * 64)
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    run = open_record(run_dir, config, run_id="a" * 32, now=1.0).run_id
    lock = hold_lock(run_dir / "launcher.lock")
    options = {"run": "second", "name": "second", "takes_over": True}
    with daemon(tmp_path, "a") as first, daemon(tmp_path, "b") as second:
        with TieredClient(first.socket_path, namespace="n", job="first") as client:
            client.own(run=run, name=f"llama/x in {run_dir}")
        (entry,) = (tmp_path / "store" / "n" / "owner").iterdir()
        before = entry.read_bytes()
        with TieredClient(second.socket_path, namespace="n", job="second") as client:
            with pytest.raises(RefusedError) as caught:
                client.own(**options)
            assert str(caught.value) == (
                f"the namespace 'n' of the store folder:{tmp_path}/store belongs to llama/x in "
                f"{run_dir} (run {'a' * 12}), which lives: a process holds the lock of "
                f"{run_dir}/launcher.lock. `launcher status '{run_dir}'` shows it, and "
                f"`launcher cancel '{run_dir}'` ends it; a daemon that a killed agent has left "
                "ends by itself"
            )
            assert entry.read_bytes() == before
            assert list(entry.parent.iterdir()) == [entry]
            os.close(lock)

            assert client.own(**options) == []
            third = {**options, "run": "third", "name": "third in /another/machine"}
            assert client.own(**third) == ["second (run second)"]


def test_a_run_whose_namespace_is_taken_while_its_daemon_is_gone_brings_nothing_more_there(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, "a") as first, daemon(tmp_path, "b") as second:
        own(first, "first")
        with TieredClient(first.socket_path, namespace="n", job="first") as client:
            client.go_back(step=0)
            first.kill()
        own(second, "second", takes_over=True)
        first.start()

        with TieredClient(first.socket_path, namespace="n", job="first") as client:
            save(client, make_id(3, generation=1 << 40, name="n"), make_content(1000))
            client.flush(step=3, generation=1 << 40)
        news = Reader(first)
        while not (told := news.news()).failure:
            pass

        assert "belongs to second in /some/folder" in told.failure
        assert not list((tmp_path / "store" / "n").glob("steps/*"))


def test_a_namespace_that_is_nobodys_any_more_is_claimed_again(tmp_path: Path) -> None:
    with daemon(tmp_path, "a") as first:
        own(first, "first")
        Reader(first).wait_for(trial="")
        shutil.rmtree(tmp_path / "store")

        with TieredClient(first.socket_path, namespace="n", job="first") as client:
            save(client, make_id(3, name="n"), make_content(1000))
            client.flush(step=3, generation=0)
            # News are of what a job has: it has to be there still.
            Reader(first).wait_for(stored_step=3)

        assert [each.name for each in (tmp_path / "store" / "n" / "owner").iterdir()] == [
            "first.json"
        ]


def test_a_store_that_fails_says_so(tmp_path: Path) -> None:
    with daemon(tmp_path, "a") as first:
        Reader(first).wait_for(trial="")
        (tmp_path / "store").rmdir()
        (tmp_path / "store").write_bytes(b"")

        with pytest.raises(TierError, match="Not a directory"):
            own(first, "first")

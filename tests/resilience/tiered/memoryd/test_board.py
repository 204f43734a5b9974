"""What a board knows: the age of steps, the store, and what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.catalog import StepAt, step_of
from resilience.tiered.memoryd.board import RECENT_STEPS, Board
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.placement import Node
from resilience.tiered.retention import plan_drops
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.uploads import Cadence, Sending, Settings, TierSettings
from resilience.tiered.vault import Vault
from tests.resilience.tiered import vaults
from tests.resilience.tiered.conftest import Clock
from tests.resilience.tiered.daemons import LIMIT_S, MIB, make_id, make_meta

LOWER = TierSettings(cadence=Cadence(every_n_steps=1), keep=3)


@pytest.fixture
def board(tmp_path: Path, clock: Clock) -> Iterator[Board]:
    arena = Arena(tmp_path / "arena", MIB)
    store = open_folder(FolderSettings(folder=tmp_path / "store"))
    yield Board(
        Vault(arena),
        Node(name="a", domain="a"),
        Settings(lower={"folder": LOWER}, incomplete_s=50, settle_s=2),
        shelf=Shelf(store, "folder", "disk", clock=clock),
        clock=clock,
    )
    arena.close()


def put(
    board: Board, step: int, *, generation: int = 0, num_shards: int = 1, name: str = "run"
) -> None:
    shard_id = make_id(step, generation=generation, name=name)
    content = b"%d of %d" % (step, generation)
    vaults.put(board.vault, shard_id, content, num_shards=num_shards)


def at(step: int, generation: int = 0) -> StepAt:
    return StepAt(step=step, generation=generation)


def test_steps_are_dated_when_they_are_seen_first(board: Board, clock: Clock) -> None:
    put(board, 1, num_shards=2)
    board.views()
    clock.now_s += 10
    put(board, 2)

    (view,) = board.views()

    assert view.since_s == {at(1): 100.0, at(2): 110.0}
    assert view.whole_since_s == {at(2): 110.0}
    assert board.rest_s([view]) == 2.0
    clock.now_s += 3
    assert board.rest_s(board.views()) is None


def test_a_generation_that_went_over_steps_is_remembered(board: Board) -> None:
    for step in (1, 5, 6):
        put(board, step)
    put(board, 5, generation=1)
    board.views()
    board.vault.drop(make_id(5, generation=1))

    (view,) = board.views()

    assert board.seen("run") == {at(1), at(5, 1)}
    assert plan_drops(view).drops == (make_id(5), make_id(6))


def test_namespaces_of_the_http_door_and_those_that_are_gone_have_no_view(board: Board) -> None:
    put(board, 1, name="http:theirs")
    put(board, 1, name="gone")
    assert [each.namespace for each in board.views()] == ["gone"]

    board.vault.drop(make_id(1, name="gone"))

    assert board.views() == []
    assert board.seen("gone") == frozenset()


def test_plans_see_the_newest_of_the_store_and_what_memory_has(board: Board) -> None:
    assert board.shelf is not None
    board.shelf.look("run", timeout_s=LIMIT_S)
    for step in range(200):
        board.shelf.note(make_meta(make_id(step), b"%d" % step))
    put(board, 7)

    (view,) = board.views()

    steps = {step_of(each).step for each in view.copies if each.tier == "folder"}
    assert steps == {7, *range(200 - RECENT_STEPS - 3, 200)}


def test_the_store_begins_to_get_a_step_once(board: Board, clock: Clock) -> None:
    assert board.shelf is not None
    board.shelf.look("run", timeout_s=LIMIT_S)
    put(board, 1)
    board.views()
    clock.now_s += 5
    sending = Sending(tier="folder", at=at(1), digest="0" * 32, node="a")

    with board.sending("run", sending):
        clock.now_s += 5
        (view,) = board.views()
        assert view.sendings == (sending,)
        board.shelf.note(make_meta(make_id(1), b"1"))
    clock.now_s += 5

    (view,) = board.views()
    assert view.begun_s == {"folder": 105.0}
    assert view.sendings == ()


def test_what_is_being_fetched_is_not_dropped(board: Board) -> None:
    put(board, 1)
    with board.fetched(make_id(1)), board.fetched(make_id(1)):
        assert board.drop([make_id(1)]) == 0
    assert board.drop([make_id(1)]) == 1


def test_whoever_waits_is_woken_by_any_change_since(board: Board) -> None:
    version = board.wait(-1, None)
    board.wake()

    assert board.wait(version, None) == version + 1
    assert board.wait(version + 1, 0.0) == version + 1


def test_a_store_is_left_alone_for_longer_after_each_error(board: Board, clock: Clock) -> None:
    shelf = board.shelf
    assert shelf is not None
    assert [shelf.fail(OSError("full")) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert shelf.pause_s() == 60
    clock.now_s += 61
    assert shelf.pause_s() == 0
    assert shelf.describe()["failing_s"] == 61

    shelf.succeed()

    assert (shelf.describe()["failing_s"], shelf.describe()["last_error"]) == (None, "full")
    assert shelf.fail(OSError("full")) == 1

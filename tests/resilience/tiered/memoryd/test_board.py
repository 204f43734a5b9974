"""The knowledge of a daemon: its age, its notes to other nodes, and its status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.catalog import Copy, StepAt, step_of
from resilience.tiered.memoryd.board import RECENT_STEPS, Board
from resilience.tiered.memoryd.notes import BoardNotes
from resilience.tiered.memoryd.peering import NoPeers
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.memoryd.status import describe_board
from resilience.tiered.placement import Node
from resilience.tiered.retention import plan_drops
from resilience.tiered.shard import ShardMeta, content_digest
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.uploads import Cadence, Sending, Settings, TierSettings, plan_uploads
from resilience.tiered.vault import Vault
from tests.resilience.tiered import vaults
from tests.resilience.tiered.daemons import LIMIT_S, MIB, make_id, make_meta
from tests.resilience.tiered.vaults import copy_of

LOWER = TierSettings(cadence=Cadence(every_n_steps=1), keep=3)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


NODES = ("a", "b")
META = make_meta(make_id(), b"hello")
DIGEST = content_digest(META)
SENDING = {"tier": "folder", "at": StepAt(step=1, generation=0), "digest": DIGEST}
SETTINGS = Settings(domains_min=1, lower={"folder": TierSettings(cadence=Cadence(every_n_steps=1))})
NO_NOTES = {"runs": {}, "sendings": [], "used": [], "stored": [], "numbers": [], "bad": []}


class Neighbours(NoPeers):
    """The nodes that are there, and what another one of them holds."""

    held: tuple[ShardMeta, ...] = ()

    def __init__(self, **living: str) -> None:
        self._living = living

    def living(self) -> dict[str, str]:
        return self._living

    def copies(self) -> list[Copy]:
        return [copy_of(each, "b") for each in self.held]


def open_boards(
    folder: Path, opened: ExitStack, settings: Settings, **more: Any
) -> dict[str, Board]:
    """Return two nodes, and a store that they share."""
    boards = {}
    for node in NODES:
        arena = Arena(folder / node, MIB)
        opened.callback(arena.close)
        shelf = Shelf(open_folder(FolderSettings(folder=folder / "store")), "folder", "store")
        own = Node(name=node, domain=node)
        boards[node] = Board(
            Vault(arena), own, settings, peers=Neighbours(a="a", b="b"), shelf=shelf, **more
        )
        vaults.put(boards[node].vault, META.id)
    return boards


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[dict[str, Board]]:
    """Two nodes that hold the same shard, and one store."""
    with ExitStack() as opened:
        yield open_boards(tmp_path, opened, SETTINGS)


def tell(boards: dict[str, Board], teller: str) -> None:
    """Let one node tell the other, as the wire would."""
    (other,) = set(NODES) - {teller}
    notes = json.loads(json.dumps(BoardNotes(boards[teller]).tell()))
    BoardNotes(boards[other]).hear(teller, notes)


def senders(board: Board) -> list[str]:
    """Return who sends, as this node has it."""
    return [each.node for view in board.views() for each in plan_uploads(view)]


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])
def test_what_a_node_sends_no_other_does_meanwhile_nor_later(
    boards: dict[str, Board], one: str, other: str
) -> None:
    """Though the other one holds it, too, and has not heard of the one's copy."""
    assert senders(boards[other]) == [other]
    with boards[one].sending("run", Sending(node=one, **SENDING)):
        tell(boards, one)
        assert senders(boards[one]) == [one]
        boards[one].shelf.note(META)
    assert boards[other].living() == {"a": "a", "b": "b"}
    tell(boards, one)

    assert senders(boards[other]) == []


def test_of_two_that_begin_at_once_each_knows_of_the_other(boards: dict[str, Board]) -> None:
    with ExitStack() as sending:
        for node in NODES:
            sending.enter_context(boards[node].sending("run", Sending(node=node, **SENDING)))
        for node in NODES:
            tell(boards, node)

        assert [boards[each].is_sent_elsewhere("run", DIGEST) for each in NODES] == [True, True]


def test_what_is_in_use_elsewhere_is_no_job_that_is_over(tmp_path: Path) -> None:
    now_s = 0.0
    with ExitStack() as opened:
        settings = Settings(domains_min=1, expire_s=100)
        boards = open_boards(tmp_path, opened, settings, clock=lambda: now_s)

        def are_over() -> list[bool]:
            for node in NODES:
                tell(boards, node)
            return [view.is_over for node in NODES for view in boards[node].views()]

        now_s = 90
        boards["a"].use("run")
        now_s = 110
        assert are_over() == [False, False]
        now_s = 191
        assert are_over() == [True, True]
        claim = boards["b"].vault.claim("run", "job")
        assert are_over() == [False, False]
        claim.close()
        assert are_over() == [True, True]


def test_a_damaged_copy_is_sent_again_once(boards: dict[str, Board]) -> None:
    a, b = (each.shelf for each in boards.values())
    a.note(META)
    tell(boards, "a")
    (copy,) = b.copies("run", intact_only=True)
    b.mark_bad(copy)
    tell(boards, "a")  # it does not know yet: this mends nothing
    assert senders(boards["b"]) == ["b"]
    tell(boards, "b")
    assert senders(boards["a"]) == ["a"]

    a.note(META)
    tell(boards, "b")  # nor does this make it damaged again
    assert senders(boards["a"]) == []
    tell(boards, "a")
    assert senders(boards["b"]) == []
    tell(boards, "b")
    (copy,) = b.copies("run", intact_only=True)
    b.mark_bad(copy)
    tell(boards, "b")
    assert senders(boards["a"]) == ["a"]


@pytest.mark.parametrize(
    "notes",
    [
        pytest.param({"bad": None}, id="no-bad"),
        pytest.param({"sendings": [["run"]]}, id="row"),
        pytest.param({"runs": {"../x": {"job": None, "runs": [[1, 2]]}}}, id="namespace"),
        pytest.param({"runs": {"x": {"job": 1, "runs": [[1, 2]]}}}, id="job"),
        pytest.param({"used": [1]}, id="used"),
        pytest.param({"runs": [], "sendings": 1, "stored": 2, "numbers": 3, "bad": 4}, id="types"),
    ],
)
def test_what_makes_no_sense_is_refused(boards: dict[str, Board], notes: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        BoardNotes(boards["a"]).hear("b", {**NO_NOTES, **notes})


def test_runs_beyond_the_limit_are_complained_of_once(
    boards: dict[str, Board], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resilience.tiered.memoryd.notes.NAMESPACES_MAX", 1)
    heard = BoardNotes(boards["a"])
    runs = {name: {"job": "job", "runs": [[1, 2]]} for name in ("one", "two")}

    for _ in range(2):
        heard.hear("b", {**NO_NOTES, "runs": runs})

    assert list(boards["a"].vault.runs()) == ["one"]
    said = [line for line in capfd.readouterr().err.splitlines() if "namespaces" in line]
    assert len(said) == 1


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

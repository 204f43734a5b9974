"""What boards of two nodes tell each other of a store that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilience.runtime.records import from_json, to_json
from resilience.tiered.arena import Arena
from resilience.tiered.catalog import StepAt
from resilience.tiered.memoryd.board import Board
from resilience.tiered.memoryd.notes import BoardNotes
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.placement import Node
from resilience.tiered.shard import content_digest
from resilience.tiered.stores.folder import FolderSettings, open_folder
from resilience.tiered.uploads import Cadence, Sending, Settings, TierSettings, plan_uploads
from resilience.tiered.vault import Vault
from tests.resilience.tiered import vaults
from tests.resilience.tiered.daemons import MIB, make_id, make_meta
from tests.resilience.tiered.vaults import Neighbours

NODES = ("a", "b")
META = make_meta(make_id(), b"hello")
DIGEST = content_digest(META)
SENDING = {"tier": "folder", "at": StepAt(step=1, generation=0), "digest": DIGEST}
SETTINGS = Settings(domains_min=1, lower={"folder": TierSettings(cadence=Cadence(every_n_steps=1))})
RUNS = [{"generation": 1, "step": 2}]


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
    notes = to_json(BoardNotes(boards[teller]).tell())
    BoardNotes(boards[other]).hear(teller, from_json(notes))


def senders(board: Board) -> list[str]:
    """Return who sends, as this node has it."""
    return [each.node for view in board.views() for each in plan_uploads(view)]


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "a")])
def test_what_a_node_sends_no_other_does_meanwhile_nor_later(
    boards: dict[str, Board], one: str, other: str
) -> None:
    """Though the other one holds it, too, and has not heard of the one's copy."""
    assert senders(boards[other]) == [other]
    sending = Sending(node=one, **SENDING)
    with boards[one].sending("run", sending):
        tell(boards, one)
        (heard,) = boards[other].views()
        assert heard.sendings == (sending,)
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
        boards["a"].uses.note_use("run")
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
        pytest.param({"sendings": [["run"]]}, id="row"),
        pytest.param({"runs": {"../x": [None, RUNS]}}, id="namespace"),
        pytest.param({"runs": {"x": [1, RUNS]}}, id="job"),
        pytest.param({"more": 1}, id="unknown"),
        pytest.param({"used": [1]}, id="used"),
        pytest.param({"runs": [], "sendings": 1, "stored": 2, "bad": 4}, id="types"),
    ],
)
def test_what_makes_no_sense_is_refused(boards: dict[str, Board], notes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"the notes cannot be read|not allowed"):
        BoardNotes(boards["a"]).hear("b", notes)


def test_runs_beyond_the_limit_are_complained_of_once(
    boards: dict[str, Board], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resilience.tiered.memoryd.notes.NAMESPACES_MAX", 1)
    heard = BoardNotes(boards["a"])
    runs = {name: ["job", RUNS] for name in ("one", "two")}

    for _ in range(2):
        heard.hear("b", {"runs": runs})

    assert list(boards["a"].vault.runs()) == ["one"]
    said = [line for line in capfd.readouterr().err.splitlines() if "namespaces" in line]
    assert len(said) == 1

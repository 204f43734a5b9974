"""What a daemon says of its store to an agent that waits for news."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.news import read_news
from tests.resilience.tiered.daemons import LIMIT_S, MIB, Daemon, make_content, make_id, save
from tests.resilience.tiered.news_reader import Reader


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def daemon(tmp_path: Path, disk: Path) -> Iterator[Daemon]:
    options = ("--store", f"folder:{disk / 'store'}", "--store-deadline-s", "5")
    with Daemon(folder=tmp_path / "arena", options=options).start() as started:
        yield started


def test_news_come_when_something_changes(daemon: Daemon, disk: Path) -> None:
    reader, client = Reader(daemon), daemon.client()
    first = reader.wait_for(trial="")
    assert (first.name, first.failure, first.lacking) == (f"folder:{disk / 'store'}", "", ())
    assert first.stored_step is None
    assert list((disk / "store").iterdir()) == [], "the trial leaves nothing there"

    save(client, make_id(3), make_content(MIB, 3))
    reader.wait_for(stored_step=3, lacking=())

    shutil.rmtree(disk)
    disk.write_bytes(b"")
    save(client, make_id(4), make_content(MIB, 4))
    news = reader.wait_for(stored_step=3, lacking=(4,))
    while not news.failure:
        news = reader.news()
    assert "Not a directory" in news.failure

    disk.unlink()
    disk.mkdir()
    assert reader.wait_for(stored_step=4, failure="", lacking=()).trial == ""


def test_another_question_ends_the_wait(daemon: Daemon) -> None:
    reader = Reader(daemon)
    reader.wait_for(trial="")
    waiting = {"op": "news", "number": reader.number + 100}

    reader.connection.send(waiting, timeout_s=LIMIT_S)
    reader.connection.send({"op": "news", "number": 0}, timeout_s=LIMIT_S)

    for _ in range(2):
        assert read_news(reader.connection.receive(timeout_s=LIMIT_S).message) is not None


def test_daemon_ends_while_an_agent_waits_for_news(daemon: Daemon) -> None:
    reader = Reader(daemon)
    reader.wait_for(trial="")
    reader.connection.send({"op": "news", "number": reader.number + 100}, timeout_s=LIMIT_S)

    assert daemon.end(signal.SIGTERM) == 0


def test_agent_that_asks_for_nothing_hears_the_last_news(tmp_path: Path, disk: Path) -> None:
    """The end may come between an answer and the next question."""
    options = ("--store", f"folder:{disk / 'store'}", "--lease-s", "60")
    with Daemon(folder=tmp_path / "arena", options=options).start() as daemon:
        reader = Reader(daemon)
        arguments = ["--dir", str(daemon.folder), "--budget-mib", "16", *options]
        assert reader.ask({"op": "supervise", "arguments": arguments})["is_same"]
        save(daemon.client(), make_id(3), make_content(1000, 3))
        reader.wait_for(stored_step=3)

        assert daemon.end(signal.SIGINT) == 0

        last = reader.connection.receive(timeout_s=LIMIT_S).message
    news = read_news(last)
    assert last["is_last"]
    assert news is not None
    assert news.stored_step == 3


def test_daemon_without_a_store_has_no_news(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        reader = Reader(daemon)

        assert reader.ask({"op": "news", "number": 0}) == {"number": 0, "store": None}


@pytest.mark.parametrize("number", [None, -1, True, "1", 1.5])
def test_wrong_number_is_refused(daemon: Daemon, number: object) -> None:
    assert Reader(daemon).ask({"op": "news", "number": number})["error"] == "invalid"

"""What a daemon that is told to end brings to the store before it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.resilience.tiered.daemons import MIB, Daemon, make_content, make_id, save
from tests.resilience.tiered.kept import NODE, say, stored, wait_until

EVERY_100 = ("--store-every-n-steps", "100")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "store"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def start(stack: ExitStack, store: Path, *words: str) -> Daemon:
    options = [*NODE, "--store", f"folder:{store}", *words]
    folder = store.parents[1] / "arena"
    return stack.enter_context(Daemon(folder=folder, options=options)).start()


def steps(store: Path) -> set[str]:
    return {each.parent.name for each in stored(store, "steps")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_last_step_that_is_not_due_is_in_the_store_when_the_daemon_has_ended(
    stack: ExitStack, store: Path, number: signal.Signals
) -> None:
    store.parent.mkdir()
    daemon = start(stack, store, *EVERY_100)
    client = daemon.client()
    for step in (6, 7):
        save(client, make_id(step), make_content(MIB, step))

    client.flush(step=7, generation=0)

    assert daemon.end(number) == 0
    assert steps(store) == {"000000000007-g0"}
    assert daemon.folder.exists() == (number == signal.SIGTERM)


def test_an_arena_goes_only_when_the_store_that_failed_has_its_steps(
    stack: ExitStack, store: Path
) -> None:
    store.parent.write_bytes(b"no folder")
    daemon = start(stack, store)
    client = daemon.client()
    save(client, make_id(1), make_content(MIB, 1))
    wait_until(lambda: "Not a directory" in say(client))
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGUSR1)

    store.parent.unlink()
    store.parent.mkdir()

    assert daemon.wait() == 0
    assert steps(store) == {"000000000001-g0"}
    assert not daemon.folder.exists()


def test_a_store_that_never_answers_holds_up_the_end_for_so_long(
    stack: ExitStack, store: Path
) -> None:
    store.parent.write_bytes(b"no folder")
    daemon = start(stack, store, *EVERY_100, "--drain-s", "0.2")
    save(daemon.client(), make_id(3), make_content(MIB, 3))
    daemon.client().flush(step=3, generation=0)

    assert daemon.end() == 3
    assert "ends after 0.2 s, and the store lacks steps [3]" in daemon.outputs[0]


def test_parts_that_others_have_sent_and_told_nobody_are_looked_for(
    stack: ExitStack, store: Path
) -> None:
    """A node may end as soon as its own part is in the store."""
    store.parent.mkdir()
    daemon = start(stack, store, *EVERY_100, "--drain-s", "60")
    save(daemon.client(), make_id(3, "0"), make_content(MIB, 0), num_shards=2)
    daemon.client().flush(step=3, generation=0)
    options = [*NODE, "--store", f"folder:{store}", *EVERY_100]
    other = stack.enter_context(Daemon(folder=store.parents[1] / "other", options=options)).start()
    for number in (0, 1):
        content = make_content(MIB, number)
        save(other.client(), make_id(3, str(number)), content, num_shards=2)
    other.client().flush(step=3, generation=0)
    assert other.end() == 0

    assert daemon.end() == 0
    assert steps(store) == {"000000000003-g0"}


def test_a_flush_without_a_store_is_nothing(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        save(daemon.client(), make_id(3), make_content(MIB, 3))
        daemon.client().flush(step=3, generation=0)

        assert daemon.end() == 0


def test_a_daemon_that_holds_nothing_waits_for_no_store(stack: ExitStack, store: Path) -> None:
    """As that of a node that came, and was asked to leave again."""
    store.parent.write_bytes(b"no folder")
    daemon = start(stack, store)
    daemon.client().flush(step=1, generation=0)

    assert daemon.end(signal.SIGTERM) == 0

"""Calls of a worker that wait for its daemon, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resilience.errors import BrokenError
from resilience.tiered import client as client_module
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError
from resilience.tiered.loader import load, newest_whole
from resilience.tiered.saver import Saver, Saving
from tests.processes import stopped
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import LIMIT_S, Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena").start() as each:
        yield each


@pytest.fixture
def client(daemon: Daemon) -> TieredClient:
    client = daemon.client()
    Saver(client, num_shards=1, has_begun=True).save(state(3), step=1, generation=0)
    return client


def state(value: int) -> PlainView:
    return PlainView([torch.full((9 << 20,), value, dtype=torch.uint8)])


def break_at(count: int) -> tuple[list[int], client_module.Check]:
    """Return what raises when it is called for the nth time, and its calls."""
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == count:
            raise BrokenError("a peer's fault")

    return calls, check


def test_check_ends_a_load_that_waits_and_the_client_goes_on(
    daemon: Daemon, client: TieredClient
) -> None:
    """The answer that comes late is not taken for that to the next request."""
    other = state(0)
    calls, check = break_at(3)
    with stopped(daemon.pid), pytest.raises(BrokenError):
        load(client, other, step=1, generation=0, check=check)

    found = newest_whole(client)
    load(client, other, step=1, generation=0, check=lambda: None)

    assert len(calls) == 3
    assert found is not None
    assert other.content() == state(3).content()


def test_check_ends_a_copy_within_it(client: TieredClient) -> None:
    other = state(0)
    _, check = break_at(2)  # the second piece

    with pytest.raises(BrokenError):
        load(client, other, step=1, generation=0, check=check)

    assert other.values[0][0] == 3
    assert other.values[0][-1] == 0


def test_check_ends_a_wait_for_another_call(client: TieredClient) -> None:
    _, check = break_at(2)

    with client._lock, pytest.raises(BrokenError):
        client.steps(check=check)


def test_check_ends_a_wait_for_the_end_of_a_save() -> None:
    saving = Saving(1)
    calls, check = break_at(2)

    with pytest.raises(BrokenError):
        saving.wait_over(LIMIT_S, check=check)

    assert len(calls) == 2
    assert not saving.wait_over(0.0)


def test_close_ends_a_call_of_another_thread(
    daemon: Daemon, client: TieredClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that waits for a daemon which does not answer holds no worker up at its end."""
    monkeypatch.setattr(client_module, "_CLOSE_TIMEOUT_S", 0.1)
    errors = []

    def begin() -> None:
        try:
            client.begin(step=2, generation=0, shard="0", num_shards=1, num_bytes=10)
        except LostError as error:
            errors.append(str(error))

    thread = threading.Thread(target=begin)
    with stopped(daemon.pid):
        thread.start()
        while not client._lock.locked():
            assert thread.is_alive()
        client.close()
        thread.join(LIMIT_S / 4)  # half of what the call itself would take
        is_ended = not thread.is_alive()
    thread.join(LIMIT_S)

    assert is_ended
    assert len(errors) == 1

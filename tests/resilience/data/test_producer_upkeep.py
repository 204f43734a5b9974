"""A producer stays replaceable, and what its source starts is as it would be without it."""

from __future__ import annotations

import fcntl
import gc
import resource
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.data.errors import ProducerError
from resilience.data.folder import PRODUCER_LOCK_NAME
from resilience.data.spawn import _listen, _started, connect_producer
from resilience.data.wire import ProducerMessage, encode_message, parse_message
from tests.processes import wait_for_end
from tests.resilience.data.scene import (
    LIMIT_S,
    Scene,
    end_process,
    fork_in_a_child,
    fork_in_a_thread,
    make_stateful,
)
from tests.resilience.data.watch import read


@pytest.mark.parametrize(
    ("source", "status"),
    [
        pytest.param(fork_in_a_child, 7, id="child-of-a-child"),
        pytest.param(fork_in_a_thread, -signal.SIGTERM, id="child-of-a-thread"),
    ],
)
def test_what_a_source_forks_runs_and_ends_as_anywhere_else(
    scene: Scene, source: Callable[..., Any], status: int
) -> None:
    read(scene.open(source), *range(3))

    assert scene.lines("status") == [status]
    assert len(scene.producers()) == 1


def test_a_producer_that_cannot_listen_any_more_is_replaced(scene: Scene) -> None:
    loader = scene.open()
    read(loader, 0)
    (pid,) = scene.producers()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))

    read(scene.open(), 500)

    wait_for_end(pid)
    read(loader, *range(1, 30))


def count_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_loader_that_is_dropped_leaves_no_descriptor_open(scene: Scene) -> None:
    read(scene.open(), 0)
    # What another test has left goes now, and not when this one's loader does.
    gc.collect()
    before = count_files()
    read(scene.open(), 0, 1)

    def drop() -> None:
        scene.loaders.pop()
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed <socket"):
        drop()

    assert count_files() == before


def test_producers_that_ended_when_nobody_waited_are_forgotten(scene: Scene) -> None:
    loader = scene.open()
    read(loader, 0)
    for _ in range(6):
        end_process(_started[-1].pid, signal.SIGKILL)
        loader.note_checkpoint(0)
        loader.explain()

    read(loader, 0, 500)


def test_a_producer_that_hangs_up_at_once_is_given_up(scene: Scene) -> None:
    loader = scene.open()
    read(loader, 0)
    end_process(scene.producers()[0], signal.SIGKILL)
    folder = Path(loader._spec.folder)
    listener = _listen(folder)
    thread = threading.Thread(target=_hang_up_on_all, args=(listener,))

    with (folder / PRODUCER_LOCK_NAME).open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        with pytest.raises(ProducerError, match="6 producers in a row have ended before batch 500"):
            loader.read(500)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        listener.close()

    read(loader, 500)


def _hang_up_on_all(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_who_forgets_to_greet_is_answered(scene: Scene) -> None:
    loader = scene.open()
    read(loader, 0)
    connection = connect_producer(Path(loader._spec.folder))
    assert connection is not None

    with connection:
        connection.settimeout(LIMIT_S)
        connection.send(encode_message(ProducerMessage("need", 3)))
        answer = parse_message(connection.recv(1000))

    assert (answer.verb, answer.number) == ("published", 3)


def test_the_source_state_of_another_position_is_not_used(scene: Scene) -> None:
    """It would lead to the batches of that position."""
    place = {"size": 2, "samples_per_batch": 2}
    first = scene.open(make_stateful, rank=0, **place)
    read(first, *range(40))
    state = first.state_dict()
    assert state["source_state"]["batch"] == 32

    other = scene.open(make_stateful, rank=1, **place)
    other.load_state_dict(state)
    read(other, 40)

    assert scene.lines("make").count(1) == 2


@pytest.mark.parametrize("job", ["", ".", "..", "a/b", "/a", "a/"])
def test_a_job_that_is_no_name_of_a_folder_is_refused(scene: Scene, job: str) -> None:
    with pytest.raises(ValueError, match="is no name of a folder; give one without '/'"):
        scene.open(job=job)


def test_a_position_that_cannot_be_is_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match="-2 samples consumed are no whole"):
        scene.open(samples_consumed=-2, samples_per_batch=2)

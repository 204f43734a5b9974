"""The process that makes batches: what it keeps, what it passes on, and when it ends."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.data import producer
from resilience.data.errors import CacheKeyError, ProducerError
from resilience.data.folder import PRODUCER_LOCK_NAME
from resilience.data.loader import CachedLoader
from resilience.data.spawn import _listen, _started, connect_producer
from resilience.data.wire import ProducerMessage, encode_message, parse_message
from tests.processes import wait_for_end
from tests.resilience.data.scene import (
    LIMIT_S,
    SampleError,
    Scene,
    end_itself,
    end_process,
    fail_at,
    fork_in_a_child,
    fork_in_a_thread,
    hold_at,
    make_batch,
    make_stateful,
    start_child,
)
from tests.resilience.data.watch import read


def wait_until_idle(loader: CachedLoader) -> None:
    """Return when the producer has made all that it may; it is asked until it says so."""
    end_s = time.monotonic() + LIMIT_S
    while "ahead" not in (text := loader.explain()) or "makes batch" in text:
        assert time.monotonic() < end_s, text


def test_an_error_of_the_dataset_arrives_as_itself_at_its_batch(scene: Scene, marker: Path) -> None:
    options = {"number": 5, "marker": str(marker)}
    loaders = [scene.open(fail_at, options) for _ in range(2)]
    for loader in loaders:
        read(loader, *range(5))

    for loader in loaders:
        with pytest.raises(SampleError, match=r"^sample 5 is torn$") as caught:
            next(iter(loader))
        assert caught.value.sample == 5
        assert "in fail_at" in str(caught.value.__cause__)
        assert loader.samples_consumed == 5
    marker.unlink()
    for loader in loaders:
        read(loader, 5, 6, 2, 20)


def test_a_producer_that_ends_again_and_again_is_given_up(scene: Scene) -> None:
    loader = scene.open(end_itself)

    with pytest.raises(ProducerError, match="6 producers in a row have ended before batch 0"):
        loader.read(0)


def test_old_segments_go_and_their_number_stays(scene: Scene) -> None:
    loader = scene.open()
    counts = set()
    for number in range(400):
        read(loader, number)
        counts.add(len(scene.segments()))

    assert max(counts) <= 5
    assert scene.lines("make").count(0) == 1


def test_batches_since_the_checkpoint_stay(scene: Scene) -> None:
    loader = scene.open()
    loader.note_checkpoint(20)
    read(loader, *range(100))

    read(scene.open(samples_consumed=20), *range(20, 30))
    assert scene.lines("make").count(20) == 1
    loader.note_checkpoint(90)
    scene.loaders[1].close()
    read(loader, *range(100, 130))
    wait_until_idle(loader)
    assert min(scene.held()) > 30


def test_a_loader_with_a_state_goes_on_from_it(scene: Scene, tmp_path: Path) -> None:
    """After its producer's death, and on a node that has no batches, only a state."""
    loader = scene.open(make_stateful)
    read(loader, *range(100))
    end_process(scene.producers()[0], signal.SIGKILL)
    read(loader, *range(100, 150))
    state = loader.state_dict()
    assert scene.lines("make").count(20) == 1

    other = scene.open(make_stateful, job="other", folder=str(tmp_path / "other"))
    other.load_state_dict(state)
    read(other, 150, 151)
    assert scene.lines("make").count(20) == 1
    assert len(list(scene.root.glob("*/state-*"))) <= 4


def make_key(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a file with a key, and the settings that name it."""
    key_file = folder / "key"
    key_file.touch(mode=0o600)
    key_file.write_bytes(bytes(range(32)))
    names = ("kms_key_id", "endpoint", "region")
    return key_file, {"kind": "file", "key_file": str(key_file), **dict.fromkeys(names)}


def test_without_a_key_the_error_says_so_and_the_batches_stay(scene: Scene, tmp_path: Path) -> None:
    key_file, encryption = make_key(tmp_path)
    loader = scene.open(encryption=encryption)
    read(loader, *range(20))
    assert not any(make_batch(18).tobytes() in path.read_bytes() for path in scene.segments())
    end_process(scene.producers()[0], signal.SIGTERM)
    key_file.chmod(0o644)

    for _ in range(2):
        with pytest.raises(CacheKeyError, match="key_file"):
            loader.read(1_000)
    with pytest.raises(CacheKeyError, match="key_file"):
        scene.open(encryption=encryption)
    key_file.chmod(0o600)
    read(scene.open(encryption=encryption, samples_consumed=18), 18)
    assert scene.lines("make").count(18) == 1
    read(loader, 1_000)


def test_it_lives_on_without_consumers_and_ends_with_its_owner(scene: Scene) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        scene.open(owner_pid=owner.pid).close()
        read(scene.open(owner_pid=owner.pid), *range(20))
        owner.kill()

    (pid,) = scene.producers()
    wait_for_end(pid)
    assert not list(scene.root.glob("*/p.sock"))


@pytest.mark.parametrize("how", ["over", "sigterm"])
def test_it_ends_when_told_even_within_the_source(scene: Scene, gate: Path, how: str) -> None:
    loader = scene.open(hold_at, {"number": 1, "gate": str(gate)})
    read(loader, 0)
    (pid,) = scene.producers()

    if how == "over":
        loader.close(is_over=True)
    else:
        os.kill(pid, signal.SIGTERM)

    wait_for_end(pid)
    if how == "over":
        assert not scene.root.exists()
        return
    names = {path.name for path in next(scene.root.glob("train-*")).iterdir()}
    assert {each for each in names if "segment" not in each} == {"cache.json", PRODUCER_LOCK_NAME}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_the_source_has_started_ends_with_it(scene: Scene, number: int) -> None:
    """A forked child must not hold the lock or the sockets of a dead producer either."""
    loader = scene.open(start_child)
    read(loader, 0)
    (child,) = scene.lines("child")

    end_process(scene.producers()[0], number)

    wait_for_end(child)
    read(loader, *range(1, 30))
    assert producer.__name__ == "resilience.data.producer"


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

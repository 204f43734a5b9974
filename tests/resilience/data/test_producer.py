"""The process that makes batches: what it keeps, what it passes on, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.data import producer
from resilience.data.errors import CacheFullError, CacheKeyError, ProducerError, SourceError
from resilience.data.folder import PRODUCER_LOCK_NAME
from resilience.data.loader import CachedLoader
from tests.processes import wait_for_end
from tests.resilience.data.scene import (
    LIMIT_S,
    SampleError,
    Scene,
    count_up,
    end_itself,
    end_process,
    fail_at,
    hold_at,
    make_batch,
    make_stateful,
    start_child,
)

MIB = 1 << 20
NUM_ITEMS_64K = 8192


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def read(loader: CachedLoader, *numbers: int) -> None:
    for number in numbers:
        assert (loader.read(number)["x"][:64] == make_batch(number)).all()


def wait_until_idle(loader: CachedLoader) -> None:
    """Return when the producer has made all that it may; it is asked until it says so."""
    end_s = time.monotonic() + LIMIT_S
    while "ahead" not in (text := loader.explain()) or "makes batch" in text:
        assert time.monotonic() < end_s, text


def used_bytes(scene: Scene) -> int:
    num_bytes = 0
    for path in scene.segments():
        with suppress(FileNotFoundError):  # deleted since they were listed
            num_bytes += path.stat().st_size
    return num_bytes


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    path = tmp_path / "marker"
    path.touch()
    return path


def test_an_error_of_the_dataset_arrives_as_itself_at_its_batch(scene: Scene, marker: Path) -> None:
    options = {"number": 5, "kind": "sample", "marker": str(marker)}
    loaders = [scene.open(fail_at, options) for _ in range(2)]
    for loader in loaders:
        read(loader, *range(5))

    for loader in loaders:
        with pytest.raises(SampleError, match=r"^sample 5 is torn$") as caught:
            loader.read(5)
        assert caught.value.sample == 5
        assert "in fail_at" in str(caught.value.__cause__)
    marker.unlink()
    for loader in loaders:
        read(loader, 5, 6, 2, 20)


def test_an_error_that_cannot_be_made_again_says_what_it_was(scene: Scene, marker: Path) -> None:
    loader = scene.open(fail_at, {"number": 0, "kind": "needy", "marker": str(marker)})

    with pytest.raises(SourceError, match=r"the source of batch 0 raised .*\.NeedyError: <object"):
        loader.read(0)


def test_what_a_batch_cannot_hold_is_an_error_at_the_batch(scene: Scene) -> None:
    loader = scene.open(count_up, {"num_items": "many"})

    with pytest.raises(TypeError, match="str"):
        loader.read(0)


def test_a_source_that_does_not_exist_is_named(scene: Scene) -> None:
    loader = scene.open(count_up, reference="tests.resilience.data.scene:nothing")

    with pytest.raises(ProducerError, match="nothing"):
        loader.read(0)


def test_a_producer_that_ends_again_and_again_is_given_up(scene: Scene) -> None:
    loader = scene.open(end_itself)

    with pytest.raises(ProducerError, match="6 producers in a row have ended before batch 0"):
        loader.read(0)


def test_so_many_batches_are_made_ahead_and_no_more(scene: Scene) -> None:
    loader = scene.open(prefetch_length=5)
    read(loader, 0)

    wait_until_idle(loader)

    assert scene.lines("make") == [0, 1, 2, 3, 4, 5]


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


def test_the_checkpoint_before_the_last_counts_where_nobody_tells(scene: Scene) -> None:
    loader = scene.open(checkpoint_frequency=200)
    read(loader, *range(790))
    wait_until_idle(loader)

    # The segment that holds 400, and nothing before it.
    assert min(scene.held()) in range(300, 401)


def test_the_budget_is_never_passed(scene: Scene) -> None:
    """Checkpoints would keep 400 batches of 64 KiB, the budget is 1 MiB."""
    loader = scene.open(
        options={"num_items": NUM_ITEMS_64K}, budget_mib=1, checkpoint_frequency=400
    )
    for number in range(60):
        read(loader, number)
        assert used_bytes(scene) <= MIB


def test_one_far_behind_holds_up_nobody(scene: Scene) -> None:
    slow = scene.open(options={"num_items": NUM_ITEMS_64K}, budget_mib=1)
    read(slow, 0)
    fast = scene.open(options={"num_items": NUM_ITEMS_64K}, budget_mib=1)

    for number in range(60):
        read(fast, number)
        assert used_bytes(scene) <= MIB
    read(slow, *range(1, 60))


def test_a_full_file_system_is_an_error_until_there_is_room(scene: Scene, tmp_path: Path) -> None:
    volume = scene.root.parent
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(volume)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        stuff = volume / ".stuff"
        loader = scene.open(options={"num_items": NUM_ITEMS_64K})
        read(loader, *range(30))
        wait_until_idle(loader)
        (maker,) = scene.producers()
        with stuff.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        os.truncate(stuff, stuff.stat().st_size - 4096)
        other = scene.open(options={"num_items": 4 * NUM_ITEMS_64K}, identity={"data": "large"})
        with pytest.raises(CacheFullError, match="No space left"):
            other.read(0)
        stuff.unlink()
        loader.close()
        # Its pages are free once it has no file of them open any more.
        end_process(maker, signal.SIGKILL)
        for path in scene.segments():
            path.unlink()
        read(other, 0)
    finally:
        scene.close()
        subprocess.run(["umount", "-l", str(volume)], check=True)


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


def test_a_source_whose_place_is_unknown_is_read_from_the_start(scene: Scene) -> None:
    loader = scene.open(make_stateful, samples_consumed=30)

    read(loader, 30, 31)

    assert scene.lines("make")[:31] == list(range(31))


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
    loader.close()
    end_process(scene.producers()[0], signal.SIGTERM)
    key_file.chmod(0o644)

    with pytest.raises(CacheKeyError, match="key_file"):
        scene.open(encryption=encryption).read(1_000)
    scene.loaders[-1].close()
    key_file.chmod(0o600)
    read(scene.open(encryption=encryption, samples_consumed=18), 18)
    assert scene.lines("make").count(18) == 1


def test_a_key_that_was_not_there_for_a_while_is_asked_for_again(
    scene: Scene, tmp_path: Path
) -> None:
    key_file, encryption = make_key(tmp_path)
    loader = scene.open(encryption=encryption, owner_pid=os.getpid())
    read(loader, 0)
    end_process(scene.producers()[0], signal.SIGKILL)
    key_file.chmod(0o644)

    for _ in range(2):
        with pytest.raises(CacheKeyError, match="key_file"):
            loader.read(1_000)
    key_file.chmod(0o600)
    read(loader, 1_000)


def test_it_ends_with_its_owner(scene: Scene) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    loader = scene.open(owner_pid=owner.pid)
    read(loader, 0)
    (pid,) = scene.producers()
    owner.kill()
    owner.wait()

    wait_for_end(pid)
    assert not list(scene.root.glob("*/p.sock"))


def test_it_lives_on_without_consumers_while_its_owner_does(scene: Scene) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        scene.open(owner_pid=owner.pid).close()
        read(scene.open(owner_pid=owner.pid), *range(20))
        owner.kill()

    assert len(scene.producers()) == 1
    wait_for_end(scene.producers()[0])


@pytest.mark.parametrize("how", ["over", "sigterm"])
def test_it_ends_when_told_even_within_the_source(scene: Scene, tmp_path: Path, how: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
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

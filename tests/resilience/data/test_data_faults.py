"""Faults of the source, of the producer and of the files: no wrong batch, and nothing left.

Each test ends with a count of processes, descriptors, locks and files.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.data.errors import (
    CacheFolderError,
    CacheFullError,
    LateBatchError,
    ProducerError,
)
from resilience.data.folder import PRODUCER_LOCK_NAME, remove_expired
from resilience.data.format import TABLE_OFFSET
from resilience.data.loader import CachedLoader
from tests.cases import slow
from tests.processes import wait_for_end
from tests.resilience.data import fault_sources as faults
from tests.resilience.data import watch
from tests.resilience.data.scene import (
    LIMIT_S,
    Scene,
    count_up,
    end_process,
    make_batch,
    make_stateful,
    run_script,
)
from tests.resilience.data.segment_files import flip
from tests.resilience.data.watch import find_processes, mounted, read

HEADER_FIRST = 16
IS_ALIVE = pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "dead"])


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with watch.watched_scene(tmp_path, monkeypatch) as scene:
        yield scene


def kill(scene: Scene) -> None:
    for pid in find_processes(scene.log.parent):
        end_process(pid, signal.SIGKILL)


def test_what_is_no_batch_is_an_error_at_its_place(scene: Scene) -> None:
    loader = scene.open(faults.yield_a_set)
    read(loader, 0, 1, 2)

    for _ in range(2):
        with pytest.raises(TypeError, match="batch"):
            loader.read(3)
    read(loader, 4, 5, 2)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ({"source": faults.fail_to_begin}, PermissionError, "corpus.bin"),
        ({"reference": "json:nothing"}, ProducerError, "the module has no nothing"),
    ],
)
def test_a_wrong_source_says_what_is_wrong_with_it(
    scene: Scene, source: dict[str, Any], error: type[Exception], text: str
) -> None:
    loader = scene.open(**source)

    for _ in range(2):
        with pytest.raises(error, match=text):
            loader.read(0)


def test_the_end_of_the_data_stays_the_end(scene: Scene) -> None:
    """Each further pass over the loader is an epoch of as many batches."""
    loader = scene.open(options={"num_batches": 5}, lookback_length=0, prefetch_length=1)
    for is_killed in (False, False, True, False):
        if is_killed:
            kill(scene)
        assert [batch["number"] for batch in loader] == list(range(5))
        with pytest.raises(IndexError, match="the stage has 5"):
            loader.read(5)


def test_a_batch_beyond_the_budget_costs_itself_alone(scene: Scene) -> None:
    loader = scene.open(faults.grow_at, {"number": 5}, budget_mib=1)
    read(loader, *range(5))

    for _ in range(2):
        with pytest.raises(CacheFullError, match=r"batch 5 .* set resilience.mmap.budget_mib to 3"):
            loader.read(5)
    read(loader, *range(6, 40))


@pytest.mark.parametrize(
    ("seed", "num_deaths"), [(1, 8), *(slow(seed, 40) for seed in range(2, 9))]
)
def test_a_producer_killed_at_any_line_costs_no_batch(
    scene: Scene, tmp_path: Path, seed: int, num_deaths: int
) -> None:
    chance = random.Random(seed)
    plan = tmp_path / "plan"
    numbers = [chance.randrange(1, 1500) for _ in range(num_deaths)]
    plan.write_text(" ".join(map(str, numbers)))
    loader = scene.open(faults.die_at_lines, {"plan": str(plan)}, checkpoint_frequency=5)
    number = 0
    while plan.read_text():
        # By chance six in a row die over one batch, which is an error; asked again, it comes.
        with suppress(ProducerError):
            read(loader, number)
            number += 1
    read(loader, *range(number, number + 20))
    assert len(scene.producers()) == num_deaths + 1


@pytest.mark.parametrize("seed", [1, slow(2)])
def test_a_producer_killed_at_any_moment_costs_no_batch(scene: Scene, seed: int) -> None:
    """Also before it has begun, and without a moment for the kernel to let go of its lock."""
    chance = random.Random(seed)
    num_batches = 300 if seed == 1 else 3000
    kills = set(chance.sample(range(num_batches), num_batches // 40))
    loader = scene.open(count_up, prefetch_length=2)

    for number in range(num_batches):
        if number in kills:
            for _ in range(chance.choice([0, 100, 10_000, 300_000])):
                os.getppid()
            for pid in find_processes(scene.log.parent):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        read(loader, number)


@IS_ALIVE
@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_torn_file_costs_no_batch(scene: Scene, seed: int, is_alive: bool) -> None:
    chance = random.Random(seed)
    loader = scene.open(lookback_length=100)
    read(loader, *range(30))
    if not is_alive:
        kill(scene)
    for path in scene.segments():
        size = path.stat().st_size
        os.truncate(path, chance.choice([0, 100, TABLE_OFFSET, chance.randrange(size), size - 1]))

    read(loader, *range(40))
    read(scene.open(lookback_length=100), *range(60))
    read(loader, *range(40, 60))


@pytest.mark.parametrize(("part", "is_alive"), [("payload", True), ("header", False)])
def test_a_flipped_bit_costs_no_batch(scene: Scene, part: str, is_alive: bool) -> None:
    loader = scene.open(lookback_length=100)
    # So many that the producer is done with the first segment.
    read(loader, *range(80))
    if not is_alive:
        kill(scene)
    content = make_batch(12).tobytes()
    (path,) = (each for each in scene.segments() if content in each.read_bytes())
    flip(path, path.read_bytes().index(content) + 5 if part == "payload" else HEADER_FIRST)

    read(scene.open(lookback_length=100), *range(25))
    read(loader, *range(40))
    assert scene.lines("make").count(12) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "another"])
def test_a_damaged_state_of_a_loader_costs_no_batch(scene: Scene, damage: str) -> None:
    loader = scene.open(make_stateful, lookback_length=100, prefetch_length=4)
    read(loader, *range(40))
    kill(scene)
    states = sorted(scene.root.glob("*/state-*"))
    for path in states:
        content = path.read_bytes()
        if damage == "flip":
            path.write_bytes(content.replace(b'"number": ', b'"number": 1'))
        elif damage == "cut":
            path.write_bytes(content[:-1])
        else:
            path.write_bytes(states[0].read_bytes())

    read(loader, *range(40, 60))
    read(scene.open(make_stateful, lookback_length=100), *range(60))


def test_what_a_killed_producer_had_half_written_goes(scene: Scene) -> None:
    loader = scene.open(make_stateful)
    read(loader, *range(20))
    kill(scene)
    (cache,) = scene.root.glob("train-*")
    half = [cache / name for name in (".state-16.json.123", ".segment-00000009.batches")]
    for path in half:
        path.write_text("half")

    read(loader, *range(20, 60))

    # The next producer may have such files of its own by now.
    for path in half:
        with suppress(FileNotFoundError):
            assert path.read_bytes() != b"half"


NUM_ITEMS_64K = 8192

READ = """
import sys
from pathlib import Path
from resilience.data import loader as loaders
from tests.resilience.data.watch import read
from tests.resilience.data.scene import Scene
loaders._LINGER_S = 0.5
loader = Scene(Path(sys.argv[1])).open(lookback_length=100)
read(loader, *range(20))
print("reads", flush=True)
sys.stdin.readline()
read(loader, *range(20, 60))
print("has read", flush=True)
loader.close()
"""

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def end_producers(scene: Scene) -> None:
    for pid in find_processes(scene.log.parent):
        end_process(pid, signal.SIGTERM)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_bsize


def read_or_fail(loader: CachedLoader, number: int) -> bool:
    try:
        read(loader, number)
    except CacheFullError:
        return False
    return True


@pytest.mark.parametrize("source", [count_up, make_stateful])
def test_a_file_system_that_fills_up_costs_no_batch(scene: Scene, source: Any) -> None:
    """Others fill it to the last byte and give it back; what is read is right or an error."""
    chance = random.Random(1)
    options = {"num_items": NUM_ITEMS_64K} if source is count_up else {}
    with mounted(scene.root.parent, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        loader = scene.open(source, options)
        filler = scene.root.parent / "filler"
        for number in range(120):
            if chance.random() < 0.2:
                # The producer may have taken some of it before it is written.
                with suppress(OSError), filler.open("ab") as file:
                    file.write(bytes(free_bytes(scene.root.parent)))
            if not read_or_fail(loader, number):
                filler.unlink()
                read(loader, number)
        filler.unlink(missing_ok=True)
        read(loader, *range(120, 140))
        scene.close()


@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=5"])
def test_a_file_system_without_any_room_is_an_error_that_says_so(
    scene: Scene, options: str
) -> None:
    with mounted(scene.root.parent, "-t", "tmpfs", "-o", options, "tmpfs"):
        filler = scene.root.parent / "filler"
        filler.write_bytes(bytes(min(1 << 16, free_bytes(scene.root.parent))))

        with pytest.raises(
            (CacheFolderError, CacheFullError), match=rf"{scene.root}.*: No space left on device; "
        ):
            scene.open().read(0)
        filler.unlink()
        remount = ["mount", "-o", "remount,size=1m,nr_inodes=100", str(scene.root.parent)]
        subprocess.run(remount, check=True)
        read(scene.open(), *range(20))
        scene.close()


def test_a_read_only_folder_is_named_also_with_a_cache_in_it(scene: Scene) -> None:
    loader = scene.open()
    read(loader, *range(5))
    loader.close()
    end_producers(scene)
    with mounted(scene.root, "--bind", str(scene.root)):
        mount = ["mount", "-o", "remount,ro,bind", str(scene.root)]
        subprocess.run(mount, check=True)

        with pytest.raises(
            CacheFolderError, match=f"{scene.root}: {os.strerror(errno.EROFS)}; set resilience"
        ):
            scene.open()
    read(scene.open(), *range(30))


def test_a_folder_that_somebody_removes_is_an_error_and_can_be_made_again(scene: Scene) -> None:
    """Whether its producer lives or not; and the end of the old one does the new one no harm."""
    old = scene.open()
    read(old, 0)
    shutil.rmtree(scene.root)
    for is_alive in (True, False):
        if not is_alive:
            end_process(scene.producers()[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(CacheFolderError, match="removed this one, make the loader anew"):
                old.read(500)

    read(scene.open(), *range(500, 520))


def test_the_end_of_a_removed_cache_leaves_the_new_one_alone(scene: Scene) -> None:
    old = scene.open()
    read(old, 0)
    shutil.rmtree(scene.root)
    read(scene.open(), 0)
    old.close(is_over=True)

    read(scene.open(deadline_s=20), *range(300, 320))
    assert len(scene.producers()) == 2


def test_a_lock_whose_holder_was_killed_holds_up_nobody(scene: Scene) -> None:
    """The producer's lock and the job's; what the dead have left is taken over."""
    loader = scene.open()
    read(loader, *range(10))
    loader.close()
    end_producers(scene)
    (lock,) = scene.root.glob(f"*/{PRODUCER_LOCK_NAME}")
    holder = run_script(HOLD, str(lock))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    waiting = scene.open(deadline_s=1)
    read(waiting, 9)
    with pytest.raises(LateBatchError, match="holds the producer's lock and does not listen"):
        waiting.read(50)

    holder.kill()
    holder.communicate(timeout=LIMIT_S)
    read(scene.open(), *range(9, 60))
    read(waiting, 50)


def test_two_jobs_of_a_node_do_not_meet(scene: Scene, tmp_path: Path) -> None:
    """Nor does the one whose keep time is over, and a third that begins, harm those that live."""
    jobs = tmp_path / "jobs"
    living = scene.open(folder=str(jobs), job="living")
    read(living, *range(20))
    old = scene.open(folder=str(jobs), job="old")
    read(old, *range(20))
    old.close()
    end_process(scene.producers()[1], signal.SIGTERM)
    for path in jobs.glob("**/*"):
        os.utime(path, (0, 0), follow_symlinks=False)

    with scene.open(folder=str(jobs), job="new") as loader:
        read(loader, 0)
        loader.close(is_over=True)

    assert [each.name for each in jobs.iterdir()] == ["living"]
    read(living, *range(20, 60))


def test_a_killed_worker_leaves_nothing_behind(scene: Scene, tmp_path: Path) -> None:
    """Its producer ends some time after it; another worker is served until then and after."""
    killed, other = (run_script(READ, str(tmp_path)) for _ in range(2))
    for each in (killed, other):
        assert each.stdout is not None
        assert each.stdout.readline() == "reads\n"
    killed.kill()
    killed.communicate(timeout=LIMIT_S)

    assert other.communicate("go on\n", timeout=LIMIT_S)[0] == "has read\n"
    assert other.returncode == 0
    for pid in find_processes(tmp_path):
        wait_for_end(pid)


def test_nothing_goes_by_age(scene: Scene) -> None:
    """A worker takes a year a batch, by the clocks of the files and of who removes old caches."""
    loader = scene.open(prefetch_length=4, keep_s=1)
    year_s = 365 * 24 * 3600.0
    now_s = [time.time()]
    read(loader, 0)
    for number in range(1, 30):
        for path in scene.root.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        removed = remove_expired(scene.root.parent / "other", clock=lambda: now_s[0])
        assert removed == ()
        read(loader, number)
        now_s[0] += year_s
    made = scene.lines("make")
    assert made == sorted(set(made))
    assert len(scene.producers()) == 1

    loader.close(is_over=True)
    assert not scene.root.exists()

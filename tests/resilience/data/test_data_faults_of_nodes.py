"""Faults of a node: its folders, locks and file systems, other jobs, and workers that are killed.

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

from resilience.data.errors import CacheFolderError, CacheFullError, LateBatchError
from resilience.data.folder import PRODUCER_LOCK_NAME, remove_expired
from resilience.data.loader import CachedLoader
from resilience.data.segments import segment_path
from tests.processes import wait_for_end
from tests.resilience.data import fault_sources as faults
from tests.resilience.data import watch
from tests.resilience.data.scene import (
    LIMIT_S,
    Scene,
    count_up,
    end_process,
    make_stateful,
    run_script,
)
from tests.resilience.data.watch import find_processes, mounted, read

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


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with watch.watched_scene(tmp_path, monkeypatch) as scene:
        yield scene


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


def test_a_changed_recipe_never_gets_an_old_batch(scene: Scene, tmp_path: Path) -> None:
    """Not even where files of the old one lie in the new one's folder."""
    version = tmp_path / "version"
    version.write_text("old")
    options = {"version_file": str(version), "seed": 7}
    with scene.open(faults.read_version, options) as loader:
        read(loader, *range(20))
        old = scene.segments()[-1].read_bytes()
    end_producers(scene)
    version.write_text("new")
    again = scene.open(faults.read_version, options, samples_consumed=16)
    assert again.read(16)["version"] == "old"
    again.close()
    end_producers(scene)

    loaders = [
        scene.open(faults.read_version, options, identity={"data": "other"}),
        scene.open(faults.read_version, {**options, "seed": 8}),
        scene.open(faults.read_version, options, samples_per_batch=2),
        scene.open(faults.read_version, options, stage="val"),
    ]
    for loader, seed in zip(loaders, (7, 8, 7, 7), strict=True):
        folder = Path(loader._spec.folder)
        for number in range(40):
            if number % 10 == 0:
                segment_path(folder, 100 + number).write_bytes(old)
            batch = loader.read(number)
            assert (batch["version"], batch["seed"]) == ("new", seed)


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

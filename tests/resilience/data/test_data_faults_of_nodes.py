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
from tests.processes import parents, wait_for_end
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
folder, root, job, data, num_items, is_over = sys.argv[1:]
loaders._LINGER_S = 0.5
scene = Scene(Path(folder))
options = {"num_items": int(num_items)}
loader = scene.open(
    options=options, folder=root, job=job, identity={"data": data}, lookback_length=100, keep_s=600
)
for number in range(20):
    assert len(loader.read(number)["x"]) == int(num_items)
print("reads", flush=True)
sys.stdin.readline()
for number in range(20, 60):
    batch = loader.read(number)
    assert len(batch["x"]) == int(num_items) and batch["number"] == number
print("has read", flush=True)
loader.close(is_over=bool(int(is_over)))
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


class Workers:
    """Consumers in other processes, which stop in the middle until they are told to go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        root: Path,
        job: str = "job",
        *,
        data: str = "test",
        num_items: int = 64,
        is_over: bool = False,
    ) -> subprocess.Popen[str]:
        arguments = (self.folder, root, job, data, num_items, int(is_over))
        worker = run_script(READ, *map(str, arguments))
        self.started.append(worker)
        return worker

    def await_middle(self) -> None:
        for worker in self.started:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "reads\n"

    def finish(self, worker: subprocess.Popen[str]) -> None:
        assert worker.communicate("go on\n", timeout=LIMIT_S)[0] == "has read\n"
        assert worker.returncode == 0


@pytest.fixture
def workers(tmp_path: Path, scene: Scene) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    for worker in workers.started:
        worker.kill()
        worker.communicate(timeout=LIMIT_S)


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


@pytest.mark.parametrize("path", ["/proc/none", "/sys/none", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_named(scene: Scene, path: str) -> None:
    with pytest.raises(CacheFolderError, match=f"{path}/job: .*; set resilience.mmap.folder to"):
        scene.open(folder=path)


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


@pytest.fixture
def version(tmp_path: Path) -> Path:
    path = tmp_path / "version"
    path.write_text("old")
    return path


CHANGES = [
    {"identity": {"data": "test", "tokenizer": "other"}},
    {"identity": {}},
    {"options": {"seed": 8}},
    {"samples_per_batch": 2},
    {"size": 2},
    {"size": 2, "rank": 1},
    {"stage": "val"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_recipe_never_gets_an_old_batch(
    scene: Scene, version: Path, change: dict[str, Any]
) -> None:
    """Not even where files of the old one lie in the new one's folder."""
    more = dict(change)
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

    options = {**options, **more.pop("options", {})}
    loader = scene.open(faults.read_version, options, **more)
    folder = Path(loader._spec.folder)
    for number in range(40):
        if number % 10 == 0:
            segment_path(folder, 100 + number).write_bytes(old)
        batch = loader.read(number)
        assert (batch["version"], batch["seed"]) == ("new", options["seed"])


def test_a_lock_whose_holder_was_killed_holds_up_nobody(scene: Scene) -> None:
    """The producer's lock and the job's; what the dead have left is taken over."""
    loader = scene.open()
    read(loader, *range(10))
    loader.close()
    end_producers(scene)
    (lock,) = scene.root.glob(f"*/{PRODUCER_LOCK_NAME}")
    holders = [run_script(HOLD, str(lock))]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
    waiting = scene.open(deadline_s=1)
    read(waiting, 9)
    with pytest.raises(LateBatchError, match="holds the producer's lock and does not listen"):
        waiting.read(50)

    for holder in holders:
        holder.kill()
        holder.communicate(timeout=LIMIT_S)
    read(scene.open(), *range(9, 60))
    read(waiting, 50)


def test_two_jobs_of_a_node_do_not_meet(scene: Scene, workers: Workers, tmp_path: Path) -> None:
    """Nor does the one whose keep time is over, and a third that begins, harm those that live."""
    jobs = tmp_path / "jobs"
    for job, num_items in {"one": 64, "two": 65, "old": 66}.items():
        workers.start(jobs, job, num_items=num_items)
    workers.await_middle()
    old = workers.started.pop()
    workers.finish(old)
    for pid in set(scene.producers()) - living_producers(workers.started):
        wait_for_end(pid)
    for path in jobs.glob("**/*"):
        os.utime(path, (0, 0), follow_symlinks=False)

    with scene.open(folder=str(jobs), job="new") as loader:
        read(loader, 0)
        loader.close(is_over=True)

    assert {each.name for each in jobs.iterdir()} == {"one", "two"}
    for worker in workers.started:
        workers.finish(worker)


def living_producers(others: list[subprocess.Popen[str]]) -> set[int]:
    """Return the producers that some processes have started."""
    pids = {each.pid for each in others}
    return {child for child, parent in parents().items() if parent in pids}


@pytest.mark.slow
def test_two_runs_of_a_job_share_what_is_the_same(
    scene: Scene, workers: Workers, tmp_path: Path
) -> None:
    """One of them ends the producer as its own; the other and a third of other data go on."""
    root = tmp_path / "jobs"
    first = workers.start(root, is_over=True)
    others = [workers.start(root), workers.start(root, data="other", num_items=65)]
    workers.await_middle()
    assert len(list(root.glob("job/train-*"))) == len(scene.producers()) == 2

    workers.finish(first)

    for worker in others:
        workers.finish(worker)


def test_a_killed_worker_leaves_nothing_behind(
    scene: Scene, workers: Workers, tmp_path: Path
) -> None:
    """Its producer ends some time after it; another worker is served until then and after."""
    root = tmp_path / "jobs"
    killed, other = workers.start(root), workers.start(root)
    workers.await_middle()
    killed.kill()
    killed.wait(LIMIT_S)

    workers.finish(other)
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

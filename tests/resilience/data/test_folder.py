"""Who may use a folder, how long it stays, and that what is in use never goes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from resilience.data import folder as folders
from resilience.data.errors import CacheFolderError
from resilience.data.fingerprint import cache_name
from resilience.data.folder import (
    RootLease,
    open_cache,
    open_root,
    remove_expired,
    remove_old_caches,
)
from resilience.data.marker import MARKER_NAME, is_root
from tests.resilience.data.scene import ROOT, run_script

WAIT_S = 60
KEEP_S = 100.0

IN_A_PROCESS = """
import sys, time
from pathlib import Path
from resilience.data.folder import open_cache, open_root

root, job, keep_s, cache = sys.argv[1:]
lease = open_root(Path(root), job, float(keep_s), removes_expired=False)
if cache:
    open_cache(lease, cache, "text")
print("open", flush=True)
sys.stdin.read()
lease.close()
"""

KILLED_WITHIN_A_REMOVAL = """
import os, signal, sys
from pathlib import Path
from resilience.data import folder

folder.shutil.rmtree = lambda path: os.kill(os.getpid(), signal.SIGKILL)
folder.remove_expired(Path(sys.argv[1]), clock=lambda: float(sys.argv[2]))
"""

Start = Callable[..., "subprocess.Popen[str]"]


def open_in_a_process(root: Path, job: str, cache: str) -> subprocess.Popen[str]:
    return run_script(IN_A_PROCESS, str(root), job, str(KEEP_S), cache)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what starts a process that holds a lease."""
    started: list[subprocess.Popen[str]] = []

    def start_one(root: Path, job: str, cache: str = "") -> subprocess.Popen[str]:
        process = open_in_a_process(root, job, cache)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        return process

    yield start_one
    for each in started:
        each.kill()
        each.communicate(timeout=WAIT_S)


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL


def after(seconds: float) -> Callable[[], float]:
    """A clock that is ahead."""
    return lambda: time.time() + seconds


def name(text: str, stage: str = "train", rank: int = 0, size: int = 2) -> str:
    return cache_name(text, stage=stage, rank=rank, size=size)  # type: ignore[arg-type]


def open_here(root: Path, job: str = "here") -> closing[RootLease]:
    return closing(open_root(root, job, KEEP_S))


def test_a_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    """Also one that others could read before."""
    root = tmp_path / "deep" / "job"
    root.mkdir(parents=True, mode=0o755)

    with open_here(root) as lease:
        cache = open_cache(lease, name("a"), "what it is")

    assert cache == root / name("a")
    assert (cache / folders.DESCRIPTION_NAME).read_text() == "what it is"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_a_job_finds_again_what_it_left(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "job"
    kill(start(root, "job", name("a")))
    (root / name("a") / "segment").write_text("batches")

    with closing(open_root(root, "job", KEEP_S, clock=after(10 * KEEP_S))) as lease:
        cache = open_cache(lease, name("a"), "text")

        assert (cache / "segment").read_text() == "batches"


@pytest.mark.parametrize("leave", [end, kill])
def test_the_folder_of_an_ended_job_goes_after_its_keep_time_when_another_begins(
    tmp_path: Path, start: Start, leave: Callable[[subprocess.Popen[str]], None]
) -> None:
    leave(start(tmp_path / "old", "old", name("a")))

    assert remove_expired(tmp_path / "new", clock=after(KEEP_S - 60)) == ()
    open_root(tmp_path / "new", "new", KEEP_S, clock=after(KEEP_S + 60)).close()
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_the_keep_time_counts_from_the_last_use(tmp_path: Path, start: Start) -> None:
    """A job that ran for long and was killed as a whole has not given its lease back."""
    now_s = time.time()
    kill(start(tmp_path / "old", "old", name("a")))
    os.utime(tmp_path / "old" / folders.ALIVE_NAME, (0, 0))
    os.utime(tmp_path / "old" / name("a"), (now_s + 500, now_s + 500))

    assert remove_expired(tmp_path / "new", clock=lambda: now_s + 500 + KEEP_S - 1) == ()
    assert remove_expired(tmp_path / "new", clock=lambda: now_s + 500 + KEEP_S + 1)


def test_a_living_job_is_never_removed(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path / "old", "old", name("a"))
    kill(start(tmp_path / "old", "old", name("a")))

    assert remove_expired(tmp_path / "new", clock=after(1e9)) == ()

    end(first)
    assert remove_expired(tmp_path / "new", clock=after(1e9)) == (tmp_path / "old",)


def test_a_lease_outlives_what_it_has_started(tmp_path: Path) -> None:
    """A subprocess does not hold its parent's lease."""
    with open_here(tmp_path / "old"):
        child = subprocess.Popen(["sleep", "1000"])
    try:
        assert remove_expired(tmp_path / "new", clock=after(1e9)) == (tmp_path / "old",)
    finally:
        child.kill()
        child.wait(WAIT_S)


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path: Path, start: Start) -> None:
    end(start(tmp_path / "old", "old", name("a")))
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED_WITHIN_A_REMOVAL,
            str(tmp_path / "new"),
            str(time.time() + KEEP_S + 60),
        ],
        cwd=ROOT,
        timeout=WAIT_S,
    )
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".")

    with open_here(tmp_path / "new"):
        pass

    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / folders.MARKER_NAME).write_text("something else")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "file").touch()
    (tmp_path / folders._REMOVED_PREFIX).symlink_to(tmp_path / "folder")

    assert remove_expired(tmp_path / "new", clock=after(1e9)) == ()
    assert len(list(tmp_path.iterdir())) == 4
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_a_marker_that_was_cut_short_does_not_keep_a_folder_for_ever(tmp_path: Path) -> None:
    with open_here(tmp_path / "old"):
        pass
    (tmp_path / "old" / folders.MARKER_NAME).write_text("")

    assert remove_expired(tmp_path / "new", clock=after(23 * 3600)) == ()
    assert remove_expired(tmp_path / "new", clock=after(25 * 3600)) == (tmp_path / "old",)


def test_a_folder_that_another_living_job_uses_is_refused(tmp_path: Path, start: Start) -> None:
    other = start(tmp_path / "shared", "one", name("a"))

    with pytest.raises(
        CacheFolderError, match=r"is in use by the job 'one'; set .* for the job 'two'"
    ):
        open_here(tmp_path / "shared", "two")

    kill(other)
    with open_here(tmp_path / "shared", "two"):
        assert not (tmp_path / "shared" / name("a")).exists()
        with pytest.raises(CacheFolderError, match="in use by the job 'two'"):
            open_here(tmp_path / "shared", "one")


def test_many_workers_take_over_a_folder_at_once(tmp_path: Path, start: Start) -> None:
    kill(start(tmp_path / "shared", "one", name("a")))

    workers = [open_in_a_process(tmp_path / "shared", "two", name("b")) for _ in range(6)]

    assert [each.communicate(timeout=WAIT_S)[0] for each in workers] == ["open\n"] * 6
    assert [each.name for each in (tmp_path / "shared").glob("train-*")] == [name("b")]


@pytest.mark.parametrize(
    ("old", "is_kept"),
    [
        pytest.param(name("old"), False, id="changed-recipe"),
        pytest.param(name("new", size=4), False, id="other-number-of-positions"),
        pytest.param(name("old", rank=1), True, id="another-position"),
        pytest.param(name("old", stage="val"), True, id="another-stage"),
        pytest.param("other", True, id="something-else"),
    ],
)
def test_a_new_cache_takes_the_place_of_old_ones(tmp_path: Path, old: str, is_kept: bool) -> None:
    (tmp_path / "job").mkdir()
    with open_here(tmp_path / "job"):
        (tmp_path / "job" / old).mkdir()

    with open_here(tmp_path / "job") as lease:
        open_cache(lease, name("new"), "text")
        remove_old_caches(lease.path, name("new"))

    assert (tmp_path / "job" / old).exists() == is_kept
    assert list((tmp_path / "job").glob(".*")) == []


def test_an_old_cache_stays_while_somebody_uses_it(tmp_path: Path, start: Start) -> None:
    other = start(tmp_path / "job", "here", name("old"))

    with open_here(tmp_path / "job") as lease:
        remove_old_caches(lease.path, name("new"))
        assert (tmp_path / "job" / name("old")).exists()

        kill(other)
        remove_old_caches(lease.path, name("new"))
        assert not (tmp_path / "job" / name("old")).exists()


def test_a_description_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    with open_here(tmp_path / "job") as lease:
        description = open_cache(lease, name("a"), "all of it") / folders.DESCRIPTION_NAME
        description.write_text("all")

        open_cache(lease, name("a"), "all of it")

        assert description.read_text() == "all of it"


def test_a_folder_that_is_none_of_ours_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "thesis.tex").touch()
    mode = tmp_path.stat().st_mode

    for path, message in {
        "link": r"link is a link, .*; set resilience.mmap.folder",
        "": "holds other files, such as (link|thesis.tex); set",
        "thesis.tex": r"cannot use the cache folder .*thesis.tex: Not a directory",
    }.items():
        with pytest.raises(CacheFolderError, match=message):
            open_here(tmp_path / path)
    assert tmp_path.stat().st_mode == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)

    with pytest.raises(
        CacheFolderError, match=re.escape(f"{tmp_path} belongs to user 12345, not to 0; set")
    ):
        open_here(tmp_path)


@pytest.fixture
def closed() -> Iterator[Path]:
    """Return a read-only folder, and be a user to whom that applies: to root it does not."""
    is_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o500)
    if is_root:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    folder.chmod(0o700)
    folder.rmdir()


def test_a_read_only_folder_is_named_with_what_to_do(closed: Path) -> None:
    with pytest.raises(
        CacheFolderError,
        match=rf"{closed}/job: Permission denied; set resilience.mmap.folder to a folder that",
    ):
        open_here(closed / "job")


def test_who_opens_a_folder_that_others_make_and_remove_meanwhile_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "job"
    looks = 0

    def made_and_removed_between_looks(path: Path) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            root.rename(tmp_path / "removed")
        found = is_root(path)
        if looks == 1:
            (root / MARKER_NAME).touch()
        return found

    monkeypatch.setattr("resilience.data.folder.is_root", made_and_removed_between_looks)

    with open_here(root):
        assert (root / MARKER_NAME).stat().st_size
    assert looks >= 3, "it did not look again"


OPENS_AGAIN_AND_AGAIN = """
import sys
from contextlib import closing
from pathlib import Path
from resilience.data.folder import MARKER_NAME, open_cache, open_root

root, cache = Path(sys.argv[1]), sys.argv[2]
for _ in range(100):
    with closing(open_root(root, "job", 1.0, removes_expired=False)) as lease:
        folder = open_cache(lease, cache, "text")
        (folder / "segment").touch()
        assert (folder / "segment").exists() and (root / MARKER_NAME).stat().st_size
"""


def test_nothing_goes_under_who_opens_it_just_then(tmp_path: Path) -> None:
    """Processes open and leave a folder that another removes whenever nobody has it."""
    command = [sys.executable, "-c", OPENS_AGAIN_AND_AGAIN, str(tmp_path / "job"), name("a")]
    workers = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    num_removed = 0

    while any(each.poll() is None for each in workers):
        num_removed += len(remove_expired(tmp_path / "other", clock=after(1e9)))

    assert [each.returncode for each in workers] == [0, 0, 0]
    assert num_removed > 0
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []

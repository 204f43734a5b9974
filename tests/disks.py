"""A disk of a test's own that is full or hangs when it is told to.

It is ext4 in a file, mounted through a loop device. To hang, the kernel freezes it, as it does for
a snapshot: whoever writes to it waits in the kernel, and ends at no signal, as with a file server
that is gone.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SIZE = "64M"
_KEEPER = 'fsfreeze -f "$0" || exit 1; echo; read line; fsfreeze -u "$0"; echo'


@contextmanager
def open_disk(folder: Path, image: Path) -> Iterator[None]:
    """Have a disk at `folder`, kept in the file `image`; skips the test where that is refused."""
    folder.mkdir()
    for command in (
        ["truncate", "-s", _SIZE, str(image)],
        ["mkfs.ext4", "-q", "-F", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            words = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"no disk of its own can be mounted here: {words.strip()}")
    try:
        yield
    finally:
        # Lazily: a process that a failed test has left may still look at it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_full_file(path: Path) -> None:
    """Make a file that takes nothing, as on a full disk; skips the test where only root may."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, Path("/dev/full").stat().st_rdev)
    except PermissionError:
        pytest.skip("no device can be made here")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to this process to write larger files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Let nobody write to the disk at `folder` within the block.

    A process of its own thaws it, also where this one is killed.
    """
    with subprocess.Popen(
        ["sh", "-c", _KEEPER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdout
        assert keeper.stdout.readline(), "the disk cannot be frozen"
        yield

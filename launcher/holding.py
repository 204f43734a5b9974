"""Locks by which one launcher at a time works in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import OutsideError

_TAKE_S, _PAUSE_S = 2.0, 0.02


def take_lock(file: int) -> None:
    """Lock an open file or folder against other launchers.

    Raises BlockingIOError where another one has it, and is neither ending nor only looking.
    """
    end_s = time.monotonic() + _TAKE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
        time.sleep(_PAUSE_S)


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder within the block, so that one launcher at a time goes on with the run.

    Raises OutsideError where another one does, or the folder cannot be opened.
    """
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise OutsideError(f"cannot open {folder}: {error.strerror}") from error
    try:
        try:
            take_lock(file)
        except BlockingIOError as error:
            raise OutsideError(f"another launcher or program works in {folder}") from error
        except OSError as error:
            # NFS locks no folder; `replace_job` still gives one of two that come at once its turn.
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield
    finally:
        os.close(file)

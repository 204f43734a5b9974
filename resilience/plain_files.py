"""Plain files in folders that other people can write to.

Somebody else may have put a pipe, a device or a link where a file is expected. Opening a pipe waits
for ever, and what is written through a link lands in a file of the link's owner's choice.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open a file, never anything else, and return its descriptor. Serves `open` as its opener.

    A link is followed to be read, and refused where the file is to be written. Raises OSError.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY:
        flags |= os.O_NOFOLLOW
    # Without waiting: a pipe would block. For a plain file it changes nothing.
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "is no plain file", str(path))


def open_linkless(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open what a writer can wait for by itself, through no link at its end. Raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def read_plain(path: Path) -> bytes:
    """Return what a file holds; raises OSError where the path names anything else."""
    with open(path, "rb", opener=open_plain) as file:
        return file.read()


def read_plain_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the same as text, whose lines end with a newline alone."""
    with open(path, encoding=encoding, opener=open_plain) as file:
        return file.read()

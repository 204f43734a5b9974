"""Plain files in folders that other people can write to.

Somebody else may have put a pipe, a device or a link where a file is expected. Opening a pipe waits
for ever, and what is written through a link lands in a file of the link's owner's choice.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

PLAIN_BYTES_MAX = 16 << 20
"""Far more than any recipe, job or record has."""


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
    """Return what a file holds; raises OSError where it is too large or no plain file."""
    with open(path, "rb", opener=open_plain) as file:
        _check_size(file.fileno(), path)
        return file.read()


def read_plain_text(path: Path, encoding: str = "utf-8") -> str:
    """Return the same as text, whose lines end with a newline alone."""
    with open(path, encoding=encoding, opener=open_plain) as file:
        _check_size(file.fileno(), path)
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says; raises ValueError also where no program of ours would have said it.

    That is what nests too deep to be read, and numbers that are not finite or beyond 64 bits.
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def _check_size(file: int, path: Path) -> None:
    if (size := os.fstat(file).st_size) > PLAIN_BYTES_MAX:
        text = f"has {size} bytes; allowed: at most {PLAIN_BYTES_MAX}"
        raise OSError(errno.EFBIG, text, str(path))


def _parse_int(text: str) -> int:
    if len(text) > _DIGITS_MAX or not -(1 << 63) <= int(text) < 1 << 64:
        raise ValueError(f"{text[:_DIGITS_MAX]}... is beyond 64 bits")
    return int(text)


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        _refuse_constant(text[:_DIGITS_MAX])
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no finite number")


_DIGITS_MAX = 20
_DECODER = json.JSONDecoder(
    parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
)

"""Values on the command lines of the daemon and of those who ask it."""

from __future__ import annotations

import argparse
from pathlib import Path

_NUMBER_MAX = 1 << 40
_TOKEN_BYTES_MAX = 4096


def positive(text: str) -> int:
    """Return a whole number of at least 1; raises ArgumentTypeError for any other text."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < _NUMBER_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds above 0; raises ArgumentTypeError for any other text."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, up to 1e6")
    return number


def read_token(text: str) -> str:
    """Return the token that a file holds; raises ArgumentTypeError where there is none."""
    try:
        with Path(text).open("rb") as file:
            found = file.read(_TOKEN_BYTES_MAX + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error
    if not 0 < len(found) <= _TOKEN_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no token; 1 to {_TOKEN_BYTES_MAX} characters are allowed"
        )
    return found

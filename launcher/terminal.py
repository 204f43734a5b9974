"""Text that a terminal shows and does not obey, whatever names it holds."""

from __future__ import annotations

from typing import Any, TextIO, cast


def printable(text: str) -> str:
    """Return text with what is no visible character written as its escape, but for ends of lines.

    A character that moves the cursor, erases, or turns the order of letters would let a file's
    name say something else than it is.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


class _Stream:
    """A stream that takes printable text alone; all else is the stream's behind it."""

    def __init__(self, behind: TextIO) -> None:
        self.behind = behind

    def write(self, text: str) -> int:
        self.behind.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def printing(stream: TextIO) -> TextIO:
    """Return the stream through which all of the launcher's words go."""
    return cast("TextIO", _Stream(stream))


def drawing(stream: TextIO) -> TextIO:
    """Return the stream behind, for who moves the cursor on purpose and prints plain text."""
    return cast("TextIO", getattr(stream, "behind", stream))

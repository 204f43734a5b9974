"""Files that others see whole or not at all, and files that the first writer alone makes."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from resilience.plain_files import open_plain


def draft_of(path: Path, writer: str) -> Path:
    """Return where one writer writes what gets that name when it is whole.

    Nobody can know the name before, and put a link to another file there.
    """
    return path.with_name(f".{path.name}.{writer}.{secrets.token_hex(8)}")


def write_whole(path: Path, data: Mapping[str, object], writer: str) -> None:
    """Write JSON data, or replace what is there. Raises OSError."""
    replace_text(path, json.dumps(data), writer)


def replace_text(path: Path, text: str, writer: str) -> None:
    """Write a text, or replace what is there. Raises OSError."""
    draft = draft_of(path, writer)
    try:
        write_text(draft, text)
        draft.replace(path)
    finally:
        # A full disk has made it, and takes nothing.
        draft.unlink(missing_ok=True)


def write_first(path: Path, data: Mapping[str, object], writer: str) -> bool:
    """Write JSON data that stay as they are; returns whether nothing was there before.

    `writer` is another one for every caller that may write at the same time. Makes the folder
    where its own folder is there. Raises OSError.
    """
    path.parent.mkdir(exist_ok=True)
    draft = draft_of(path, writer)
    try:
        write_text(draft, json.dumps(data))
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def write_text(path: Path, text: str, mode: str = "x") -> None:
    """Write a file and have the disk take it: a node that loses its power leaves no empty one.

    The file has to be new, unless the mode is "w". Raises OSError.
    """
    with open(path, mode, encoding="utf-8", opener=open_plain) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

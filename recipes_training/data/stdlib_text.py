"""The running interpreter's own library as text: found on every machine.

Files come in the order of their paths below the library's folder, each a
document of bytes. Installed packages and the library's own tests are left out.
All of it is held in memory, so `max_bytes` should stay below a gigabyte. Other
versions of Python have another text: nodes of one run need the same version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipes_training.data.tokens import Tokens, encode_bytes
from recipes_training.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


def read_stdlib_tokens(max_bytes: int) -> Tokens:
    """Return the tokens of up to `max_bytes` of text; the last file may be cut short."""
    root = Path(os.__file__).parent
    parts: list[Tokens] = []
    room = max_bytes
    for path in _python_files(root):
        if room <= 0:
            break
        text = path.read_bytes()[:room]
        room -= len(text)
        parts.append(encode_bytes(text))
    if not parts:
        raise DataError(f"no Python source below {root}; use data.kind 'jsonl'")
    return np.concatenate(parts)


def _python_files(root: Path) -> Iterator[Path]:
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        below = Path(folder).relative_to(root)
        names.extend((below / name).as_posix() for name in files if name.endswith(".py"))
    return (root / name for name in sorted(names))

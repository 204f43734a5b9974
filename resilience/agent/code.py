"""Which commit of a repository a user's program is, for the record of the run."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_DEADLINE_S = 5.0


def note_code(path: Path, write: Callable[..., None]) -> None:
    """Have `code_seen` written where a folder or file is in a checkout of git; waits for nothing.

    A machine without git, and a file server that does not answer, say nothing.
    """

    def look() -> None:
        with suppress(OSError, subprocess.SubprocessError):
            folder = path if path.is_dir() else path.parent
            commit = _ask_git(folder, "rev-parse", "HEAD")
            changes = _ask_git(folder, "status", "--porcelain", "--untracked-files=no")
            write("code_seen", folder=str(folder), commit=commit, is_dirty=bool(changes))

    threading.Thread(target=look, daemon=True).start()


def _ask_git(folder: Path, *words: str) -> str:
    return subprocess.run(
        # The folder may be another user's; nothing that its repository names is run.
        ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *words],
        cwd=folder,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
        timeout=_DEADLINE_S,
    ).stdout.strip()

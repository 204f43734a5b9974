"""What several processes of one session of tests need is made by the first that asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.apart import apart


@dataclass(frozen=True)
class Shared:
    """A folder of the whole session."""

    folder: Path

    def make_once(self, key: str, make: Callable[[Path], object]) -> Path:
        """Return the folder that `make` has filled, once for all that ask with this key.

        Where it fails, the next that asks tries again.
        """
        self.folder.mkdir(exist_ok=True)
        result = self.folder / hashlib.sha256(key.encode()).hexdigest()[:20]
        is_made = result.with_suffix(".made")
        with apart(), result.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made.exists():
                shutil.rmtree(result, ignore_errors=True)
                result.mkdir()
                make(result)
                is_made.touch()
        return result

"""Run the launcher as a person does: a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 120


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


def launch(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)

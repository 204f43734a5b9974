"""Run the launcher as a person does: a process of its own, in a folder of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 240
"""For a whole run of 200 steps, on a slow machine that others use as well."""


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


def launch(*arguments: str, folder: Path, env: dict[str, str] | None = None) -> Ended:
    """Run `python -m launcher` with the arguments.

    It is forked from a process that has imported it, but for one with variables that an
    interpreter reads while it starts.
    """
    if not any(name.startswith("PYTHON") for name in env or ()):
        return _forked(arguments, folder, env or {})
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def put(path: Path, text: str) -> Path:
    """Write a file, and make the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def last_of_each(*words: str) -> tuple[str, ...]:
    """Return the words with the last value alone of a key that is given twice."""
    return tuple({word.partition("=")[0]: word for word in words}.values())


def refuse(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run what has to be refused, and return its message."""
    before = sorted(folder.rglob("*"))

    ended = launch(*arguments, folder=folder, env=env)

    assert ended.status == 2, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert sorted(folder.rglob("*")) == before, "nothing may be written"
    return ended.err


def _forked(arguments: tuple[str, ...], folder: Path, env: dict[str, str]) -> Ended:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    request = {
        "arguments": arguments,
        "folder": str(folder),
        "environment": {**os.environ, **env},
        "timeout_s": TIMEOUT_S,
    }
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return Ended(**json.loads(server.stdout.readline()))


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server, which ends with this process: its input does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launcher.fork_server"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

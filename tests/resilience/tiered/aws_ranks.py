"""Four ranks with AWS's own writer and reader, in processes of AWS's environment."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).parents[3]
PYTHON = REPOSITORY / ".venv-aws-tiered/bin/python"
HERE = Path(__file__).parent
WORLD_SIZE = 4
LIMIT_S = 300.0

Reply = dict[str, Any]
SAVED: list[Reply] = [{}] * WORLD_SIZE


def loaded(step: int) -> list[Reply]:
    """Return what all ranks answer that have loaded a step as it was."""
    return [{"step": step, "is_equal": True}] * WORLD_SIZE


class Workers:
    """Four ranks with AWS's writer and reader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        """The parent of all ranks, which leads their group."""
        self.pipes: list[tuple[TextIO, TextIO]] = []
        """What each rank reads and writes."""

    def start(self) -> None:
        self.num_starts += 1
        store = self.folder / f"store{self.num_starts}"
        theirs = []
        for _ in range(WORLD_SIZE):
            (reads, tells), (hears, writes) = os.pipe(), os.pipe()
            self.pipes.append((os.fdopen(tells, "w"), os.fdopen(hears)))
            theirs += [reads, writes]
        self.process = subprocess.Popen(
            [PYTHON, "-W", "ignore", HERE / "aws_worker.py", store, *map(str, theirs)],
            env={**os.environ, "PYTHONPATH": ""},
            pass_fds=theirs,
            start_new_session=True,
        )
        for file in theirs:
            os.close(file)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process is None:
            return
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        for tells, hears in self.pipes:
            # No rank lives any more once this has ended.
            hears.read()
            hears.close()
            with suppress(BrokenPipeError):
                tells.close()
        self.pipes = []

    def tell(self, **command: Any) -> None:
        """Give all ranks a command; a list of `urls` names each rank's own door."""
        if self.process is None:
            self.start()
        urls = command.pop("urls", [])
        for rank, (tells, _) in enumerate(self.pipes):
            own = {**command, "url": urls[rank]} if urls else command
            tells.write(json.dumps(own) + "\n")
            tells.flush()

    def replies(self) -> list[Reply]:
        replies = []
        for rank, (_, hears) in enumerate(self.pipes):
            assert select.select([hears], [], [], LIMIT_S)[0], f"rank {rank} hangs"
            line = hears.readline()
            assert line, f"rank {rank} is gone"
            replies.append(json.loads(line))
        return replies

    def save(self, **command: Any) -> list[Reply]:
        self.tell(do="save", **command)
        return self.replies()

    def load(self, **command: Any) -> list[Reply]:
        self.tell(do="load", **command)
        return self.replies()

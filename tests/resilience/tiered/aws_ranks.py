"""Four ranks with AWS's own writer and reader, in processes of AWS's environment."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

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
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        self.num_starts += 1
        store = self.folder / f"store{self.num_starts}"
        self.processes = [
            subprocess.Popen(
                [PYTHON, "-W", "ignore", HERE / "aws_worker.py",
                 str(rank), str(WORLD_SIZE), store],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": ""},
            )
            for rank in range(WORLD_SIZE)
        ]  # fmt: skip

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        for each in self.processes:
            each.kill()
        for each in self.processes:
            each.communicate()
        self.processes = []

    def tell(self, **command: Any) -> None:
        """Give all ranks a command; a list of `urls` names each rank's own door."""
        if not self.processes:
            self.start()
        urls = command.pop("urls", [])
        for rank, each in enumerate(self.processes):
            own = {**command, "url": urls[rank]} if urls else command
            assert each.stdin is not None
            each.stdin.write(json.dumps(own) + "\n")
            each.stdin.flush()

    def replies(self) -> list[Reply]:
        replies = []
        for rank, each in enumerate(self.processes):
            assert each.stdout is not None
            assert select.select([each.stdout], [], [], LIMIT_S)[0], f"rank {rank} hangs"
            line = each.stdout.readline()
            assert line, f"rank {rank} is gone"
            replies.append(json.loads(line))
        return replies

    def save(self, **command: Any) -> list[Reply]:
        self.tell(do="save", **command)
        return self.replies()

    def load(self, **command: Any) -> list[Reply]:
        self.tell(do="load", **command)
        return self.replies()

"""Daemons forked from a process that has imported them, which else takes most of a test's time.

What is forked is what `python -m resilience.tiered.memoryd` is, but for its parent, for what /proc
tells of its words and its memory, and for the seed of hashes. This module is also the program that
forks them.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.forking import close_others, end_with, run_as, serve, show_environment
from tests.warm import Forked, fork

MODULE = "resilience.tiered.memoryd"


class WarmDaemon(Forked):
    """What `subprocess.Popen` is to who starts a daemon and reads what it says."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        out, said = os.pipe()
        err, complained = os.pipe()
        request = {"words": list(words), "folder": str(folder), "environment": dict(environment)}
        try:
            super().__init__(*fork(__name__, request, said, complained))
        finally:
            os.close(said)
            os.close(complained)
        self.stdout: IO[str] = os.fdopen(out)
        self.stderr: IO[str] = os.fdopen(err)
        self._rest = {"out": "", "err": ""}
        self._readers: list[threading.Thread] = []

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read what it still says, both files at once, and wait for its end."""
        end_s = time.monotonic() + (threading.TIMEOUT_MAX / 2 if timeout is None else timeout)
        if not self._readers:
            for name, file in (("out", self.stdout), ("err", self.stderr)):
                reader = threading.Thread(target=self._read, args=(name, file), daemon=True)
                self._readers.append(reader)
                reader.start()
        for reader in self._readers:
            reader.join(max(0.0, end_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(MODULE, timeout or 0)
        self.wait(max(0.0, end_s - time.monotonic()))
        return self._rest["out"], self._rest["err"]

    def _read(self, name: str, file: IO[str]) -> None:
        with file:
            self._rest[name] = file.read()


def _preload() -> None:
    for package in (MODULE, "resilience.tiered.stores"):
        path = importlib.import_module(package).__path__
        for each in pkgutil.walk_packages(path, f"{package}."):
            if not each.name.endswith("__main__"):
                importlib.import_module(each.name)
    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any], standard: list[int]) -> NoReturn:
    """Be a daemon, and end with its status."""
    status = 1
    try:
        for number, file in enumerate(standard):
            os.dup2(file, number)
        close_others({0, 1, 2})
        os.chdir(request["folder"])
        show_environment(request["environment"])
        status = run_as([MODULE, *request["words"]])
    finally:
        end_with(status)


if __name__ == "__main__":
    _preload()
    serve(socket.socket(fileno=int(sys.argv[1])), _become)

"""What workers print: a file for each rank and generation, and the console with a prefix."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 20


class LogFolder:
    """Where a node's workers' lines go. A folder that takes no more is said once, and left."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._files: dict[str, BinaryIO] = {}
        self._is_broken = False

    def prepare(self) -> None:
        """Make the folder; raises OSError where nothing can be written there."""
        self._path.mkdir(parents=True, exist_ok=True)
        probe = self._path / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()

    def error_path(self, number: int) -> Path:
        """Return where a worker may write how it failed, as programs of torchrun do."""
        return (self._path / f"error-{number}.json").absolute()

    def write(
        self, rank: int | None, generation: int, lines: list[bytes], *, is_error: bool
    ) -> None:
        """Write whole lines to the console, and to the file of the rank and generation."""
        who = f"rank {rank}" if rank is not None else "spare"
        prefix = f"[{self._node} {who}] ".encode()
        console = sys.stderr.buffer if is_error else sys.stdout.buffer
        with suppress(OSError):  # whoever read it has gone; the files go on
            console.write(b"".join(prefix + line + b"\n" for line in lines))
            console.flush()
        if self._is_broken:
            return
        name = "spare.log" if rank is None else f"rank-{rank}.generation-{generation}.log"
        try:
            self._open(name).write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            self._is_broken = True
            text = f"resilience.agent: no more logs in {self._path}: {error}; the run goes on\n"
            with suppress(OSError):
                sys.stderr.write(text)

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= 64:
                self.close()
            self._files[name] = (self._path / name).open("ab", buffering=0)
        return self._files[name]

    def close(self) -> None:
        """Close all files; they are opened again where something more comes."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class LineCutter:
    """Cuts what a pipe delivers into lines."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._rest = b""
        os.set_blocking(file, False)

    def read(self) -> tuple[list[bytes], bool]:
        """Return the whole lines that are there, and whether more may come."""
        try:
            data = os.read(self.file, _CHUNK_BYTES)
        except BlockingIOError:
            return [], True
        if not data:
            rest, self._rest = self._rest, b""
            return ([rest] if rest else []), False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return lines, True

    def drain(self) -> list[bytes]:
        """Return all that is left in the pipe of a worker that has ended, and close it."""
        data = self._rest
        while True:
            try:
                more = os.read(self.file, _CHUNK_BYTES)
            except BlockingIOError:
                # Something that the worker started holds the pipe; its owner is gone.
                break
            if not more:
                break
            data += more
        os.close(self.file)
        return data.splitlines()


def say(node: str, text: str) -> None:
    """Tell whoever looks after the run what an agent does."""
    with suppress(OSError):  # nobody reads
        lines = text.splitlines()
        sys.stderr.write("".join(f"resilience.agent {node}: {line}\n" for line in lines))
        sys.stderr.flush()

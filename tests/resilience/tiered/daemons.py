"""Real daemons in processes of their own, and shards to put into them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from resilience.tiered.client import TieredClient
from resilience.tiered.frames import FrameSocket
from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.shard import ShardId, ShardMeta, piece_bounds
from tests.resilience.tiered.warm_daemon import WarmDaemon

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
"""What takes longer hangs."""
MIB = 1 << 20


def make_id(step: int = 1, shard: str = "0", *, generation: int = 0, name: str = "run") -> ShardId:
    return ShardId(namespace=name, step=step, generation=generation, shard=shard)


def make_meta(shard_id: ShardId, content: bytes, *, num_shards: int = 1) -> ShardMeta:
    """Describe bytes as a shard without tensors."""
    return ShardMeta(
        id=shard_id,
        num_shards=num_shards,
        num_bytes=len(content),
        tensors=(),
        checksums=tuple(
            xxhash.xxh3_64_intdigest(content[begin:end])
            for begin, end in piece_bounds(len(content))
        ),
        rest={},
    )


def make_content(num_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ from those of any other seed."""
    return xxhash.xxh3_64_digest(b"content", seed) * (num_bytes // 8) + b"!" * (num_bytes % 8)


@dataclass(kw_only=True)
class Daemon:
    """A memoryd on a folder, which may be killed and started again there."""

    folder: Path
    budget_mib: int = 16
    options: Sequence[str] = ()
    is_real: bool = False
    """Whether it is a program of its own, with imports and memory of its own, and not forked."""
    token: str = ""
    """The token of its clients that are given no other."""
    process: subprocess.Popen[str] | WarmDaemon | None = None
    ready: str = ""
    """The line that said that all doors are open."""
    outputs: list[str] = field(default_factory=list)
    """What ended ones have said on standard error."""
    _opened: ExitStack = field(default_factory=ExitStack)

    @property
    def socket_path(self) -> Path:
        return self.folder / SOCKET_NAME

    @property
    def pid(self) -> int:
        """Return the process that runs."""
        assert self.process is not None
        return self.process.pid

    def spawn(self, *options: str, before: Sequence[str] = ()) -> None:
        """Start it without waiting; `before` is a command that runs it."""
        assert self.process is None, "one is running already"
        words = ["--dir", str(self.folder), "--budget-mib", str(self.budget_mib)]
        words += [*self.options, *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if not (before or self.is_real):
            self.process = WarmDaemon(words, self.folder.parent, environment)
            return
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "resilience.tiered.memoryd", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder.parent,
        )

    def start(self, *options: str, before: Sequence[str] = ()) -> Daemon:
        """Start it and wait until all its doors are open."""
        self.spawn(*options, before=before)
        assert self.process is not None
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], LIMIT_S)[0]:
            raise AssertionError(f"memoryd is not ready\n{self.end(signal.SIGKILL)}")
        self.ready = self.process.stdout.readline()
        if not self.ready:
            raise AssertionError(f"memoryd did not start: {self.wait()}\n{self.outputs[-1]}")
        return self

    def wait(self) -> int:
        """Return the exit status of one that ends by itself."""
        assert self.process is not None
        try:
            _, output = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, output = self.process.communicate()
            raise AssertionError(f"memoryd does not end\n{output}") from None
        self.outputs.append(output)
        status = self.process.returncode
        self.process = None
        return status

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status; what it said is in `outputs`."""
        if self.process is None:
            return 0
        self.process.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """End it as a power cut of the process would."""
        assert self.end(signal.SIGKILL) == -signal.SIGKILL

    def client(self, namespace: str | None = "run", **options: Any) -> TieredClient:
        """Return a client of job "job", which connects on its first call; closed with this."""
        given = {"namespace": namespace, "job": "job", "token": self.token, **options}
        client = TieredClient(self.socket_path, **given)
        return self._opened.enter_context(client)

    def connect(self) -> FrameSocket:
        """Return a connection that has said nothing yet; closed with this."""
        connection = FrameSocket(socket.socket(socket.AF_UNIX))
        self._opened.callback(connection.close)
        connection.socket.settimeout(LIMIT_S)
        connection.socket.connect(str(self.socket_path))
        return connection

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()
        self.end(signal.SIGKILL)


def save(client: TieredClient, shard_id: ShardId, content: bytes, *, num_shards: int = 1) -> None:
    """Save bytes as a shard."""
    with client.begin(
        step=shard_id.step,
        generation=shard_id.generation,
        shard=shard_id.shard,
        num_shards=num_shards,
        num_bytes=len(content),
    ) as draft:
        draft.memory[:] = content
        draft.commit(make_meta(shard_id, content, num_shards=num_shards))


def load(client: TieredClient, shard_id: ShardId) -> bytes:
    """Return a shard's bytes."""
    with client.read(
        step=shard_id.step, generation=shard_id.generation, shard=shard_id.shard
    ) as loan:
        return bytes(loan.memory)


def ask(connection: FrameSocket, message: dict[str, Any]) -> dict[str, Any]:
    """Return what a door answers to a message."""
    connection.send(message, timeout_s=LIMIT_S)
    return connection.receive(timeout_s=LIMIT_S).message


def segments(folder: Path) -> list[Path]:
    """Return the files of segments, sealed or not."""
    return sorted(each for each in folder.glob("segment-*") if each.suffix == "")


def wait_for_connections(client: TieredClient, number: int) -> None:
    """Wait until the daemon has let go of all connections but so many, this client's included."""
    end_s = time.monotonic() + LIMIT_S
    while client.status()["num_connections"] != number:
        assert time.monotonic() < end_s, client.status()

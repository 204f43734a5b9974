"""A client of the HTTP door that sends any bytes, and a door to send them to."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd.http import HttpDoor, Others
from resilience.tiered.memoryd.http_connection import Limits
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.vault import Vault

MIB = 1 << 20
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=DEADLINE_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> Answer:
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (each := self._file.readline()) != b"\r\n":
            name, _, value = each.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self._file.read(int(headers.get("content-length", "0")))
        return Answer(int(line.split()[1]), headers, body)

    def is_ended(self) -> bool:
        """Wait for the other end's word; True where it has nothing more to say."""
        return self._file.read(1) == b""

    def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> Answer:
        if body is not None:
            headers.setdefault("Content-Length", str(len(body)))
        self.send(head(method, target, **headers) + (body or b""))
        return self.answer()

    def put(self, space: str, rank: int, step: int, body: bytes) -> Answer:
        return self.ask("POST", shard_path(space, rank, step), body, Shard_Meta=shard_meta(body))

    def get(self, space: str, rank: int, step: int) -> Answer:
        return self.ask("GET", shard_path(space, rank, step))

    def create(self, space: str, num_ranks: int, steps_retained: int = 3) -> Answer:
        query = f"num_ranks={num_ranks}&steps_retained={steps_retained}"
        return self.ask("POST", f"/v1/cp/namespaces/{space}?{query}", b"")

    def latest(self, space: str, limit: int = 5) -> Any:
        return self.ask("GET", f"/v1/cp/checkpoints/{space}/latest?limit={limit}").content


def head(method: str, target: str, **headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: door"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def shard_path(space: str, rank: int, step: int) -> str:
    return f"/v1/cp/checkpoints/{space}/{rank}/{step}"


def shard_meta(body: bytes) -> str:
    """As AWS's client writes it."""
    checksum = base64.b64encode(xxhash.xxh3_128(body).digest()).decode()
    return json.dumps({"checksum": checksum, "algorithm": "xxh3_128"})


def nobody(vault: Vault) -> Others:
    """Return what a door needs that is alone with its vault."""
    return Others(
        bring=lambda shard_id: ("ram", vault.read(shard_id)), peers=Peers(),
        ask_room=lambda num_bytes: False, safe=lambda namespace: (),
    )  # fmt: skip


class Doors:
    """Opens doors over one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def open(
        self,
        *,
        budget_bytes: int = 64 * MIB,
        token: str | None = None,
        limits: Limits | None = None,
        ask_room: Callable[[int], bool] | None = None,
    ) -> Iterator[OpenDoor]:
        arena = Arena(self.folder, budget_bytes)
        vault = Vault(arena)
        others = nobody(vault)
        if ask_room:
            others = replace(others, ask_room=ask_room)
        door = HttpDoor(
            vault, self.folder, "127.0.0.1", 0, token=token, limits=limits, others=others
        )
        door.start()
        try:
            yield OpenDoor(door, vault)
        finally:
            door.close()
            arena.close()


@dataclass(frozen=True)
class OpenDoor:
    door: HttpDoor
    vault: Vault

    def client(self) -> Client:
        return Client(self.door.address)

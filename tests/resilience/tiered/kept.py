"""Daemons with a store, and waits for what they do by themselves."""

from __future__ import annotations

import signal
from pathlib import Path
from shutil import rmtree
from typing import Any

from resilience.tiered.client import TieredClient
from tests.resilience.tiered.daemons import Daemon
from tests.waiting import wait_until

NODE = ("--node", "node-a")


def held(client: TieredClient, name: str = "run") -> list[int]:
    """Return the steps that the daemon has in memory, newest first."""
    return [each["step"] for each in client.status()["namespaces"].get(name, [])]


def waiting(client: TieredClient, name: str = "run") -> list[int]:
    """Return the steps that wait for the store."""
    space: dict[str, Any] = client.status()["store"]["namespaces"].get(name, {})
    return list(space.get("steps_waiting", []))


def stored(folder: Path, kind: str = "data", name: str = "run") -> list[Path]:
    """Return the files of one kind in a store that is a folder."""
    return sorted(each for each in (folder / name / kind).rglob("*") if each.is_file())


def lose_memory(daemon: Daemon) -> str:
    """End the node as a power cut would; returns what its daemon has said."""
    daemon.end(signal.SIGKILL)
    rmtree(daemon.folder)
    return daemon.outputs[-1]


def say(client: TieredClient) -> str:
    """Return the last error of the store."""
    return str(client.status()["store"]["last_error"])


def wait_for_store(client: TieredClient, step: int) -> None:
    """Wait until the store has a step, and nothing more is to be sent."""

    def is_there() -> bool:
        spaces = client.status()["store"]["namespaces"]
        return spaces.get("run", {}).get("newest_step") == step and not waiting(client)

    wait_until(is_there, client.status)

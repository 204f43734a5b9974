from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import MIB
from tests.resilience.tiered.http_client import Client, Doors, OpenDoor
from tests.resilience.tiered.s3_server import S3Server, s3_environment, s3_process
from tests.resilience.tiered.vaults import Reopen


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_process(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def server(lasting_server: S3Server) -> Iterator[S3Server]:
    """A server of S3's protocol, which others have used before."""
    with s3_environment():
        yield lasting_server


@pytest.fixture
def doors(tmp_path: Path) -> Doors:
    return Doors(tmp_path / "arena")


@pytest.fixture
def door(doors: Doors) -> Iterator[OpenDoor]:
    with doors.open() as opened:
        yield opened


@pytest.fixture
def http(door: OpenDoor) -> Iterator[Client]:
    with door.client() as client:
        yield client


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """Return what gives the vault of a daemon that is started anew on the same folder."""
    arenas: list[Arena] = []

    def open_anew(budget_bytes: int = 16 * MIB) -> Vault:
        for each in arenas:
            each.close()
        arenas[:] = [Arena(tmp_path / "arena", budget_bytes)]
        return Vault(arenas[0])

    yield open_anew
    for each in arenas:
        each.close()

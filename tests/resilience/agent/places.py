"""Where the daemon of a node is, and what its agent is told of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.agent.services.memoryd import memoryd_service
from resilience.agent.services.services import Service, Services
from resilience.node_config import MemorydConfig, NodeConfig
from resilience.settings import RamTier, StoreTier
from resilience.tiered.client import TieredClient
from resilience.tiered.status import wait_for_daemon
from tests.processes import command_of
from tests.resilience.agent.runs import Run
from tests.resilience.tiered.daemons import LIMIT_S
from tests.tokens import TOKEN, write_token

_PROGRAM = Path(__file__).with_name("waiting_program.py")

RAM = RamTier(
    every_n_steps=1, every_s=None, keep=1, replicas=0, domains_min=1, budget_mib=None,
    peers_hold="copies",
)  # fmt: skip
STORE = StoreTier(
    url=None, every_n_steps=1, every_s=None, keep=None, required=True, waiting_max=None,
    deadline_s=5.0,
    endpoint=None, region=None, path_style=False, part_size_mib=None, attempts=None,
)  # fmt: skip


@dataclass
class Place:
    """Where the daemon of a node is, and what is said of it."""

    folder: Path
    arena: Path
    said: list[str] = field(default_factory=list)
    noted: list[dict[str, Any]] = field(default_factory=list)
    """Events that were written."""

    def write(
        self,
        *,
        store: Path | None = None,
        deadline_s: float = 5.0,
        is_required: bool = True,
        keep: int = 1,
        **settings: Any,
    ) -> MemorydConfig:
        """Write what agent and daemon are told."""
        changed = {"url": f"folder:{store}", "deadline_s": deadline_s, "required": is_required}
        lower = STORE.model_copy(update=changed)
        usual = {"is_external": False, "budget_mib": 16, "lease_s": 60.0, "drain_s": 2.0}
        config = MemorydConfig(
            ram=RAM.model_copy(update={"keep": keep}),
            store=lower if store else None,
            http_port=None,
            **(usual | settings),
        )
        text = NodeConfig(agent=None, memoryd=config).to_json()
        (self.folder / "node.json").write_text(text)
        return config

    def service(self, *more: str, config: MemorydConfig | None = None) -> Service:
        return memoryd_service(
            config or self.write(),
            path=self.folder / "node.json",
            node="n0",
            run_dir=self.folder,
            log=self.folder / "memoryd.log",
            more=more,
            variables=self.variables(),
        )

    def variables(self) -> dict[str, str]:
        return {
            "MEMORYD_DIR": str(self.arena),
            "MEMORYD_TOKEN_FILE": str(self.folder / "token"),
        }

    def note(self, event: str, **fields: Any) -> None:
        self.noted.append({"event": event, **fields})

    def client(self) -> TieredClient:
        return TieredClient(self.arena / "memoryd.sock", token=TOKEN, namespace="run", job="job")

    def pid(self) -> int:
        """Return the process of the daemon that answers."""
        with self.client() as client:
            return int(client.status()["pid"])

    def daemons(self) -> list[int]:
        """Return all processes of daemons on the folder."""
        mark = f"--dir={self.arena}".encode()
        pids = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal())
        return [pid for pid in pids if mark in command_of(pid).split(b"\0")]

    def log(self) -> str:
        return (self.folder / "memoryd.log").read_text()

    def end(self) -> None:
        """End what a failed test has left."""
        for pid in self.daemons():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.arena, ignore_errors=True)


def make_place(folder: Path) -> Place:
    """Return a place whose arena is in memory, and its other files in a folder."""
    write_token(folder / "token")
    return Place(folder, Path(f"/dev/shm/memoryd-test-{os.getpid()}-{folder.name[-20:]}"))


def start_agent(run: Run, place: Place) -> Path:
    """Start an agent with a daemon; return the pipe to which a write lets its program end well."""
    gate = run.folder / "let-go"
    if not gate.exists():
        os.mkfifo(gate)
    run.start(
        "n0", "--config", str(place.folder / "node.json"), "--spares", "0",
        program=(str(_PROGRAM),), warm="imports",
        variables={**place.variables(), "LET_GO": str(gate)},
    )  # fmt: skip
    wait_for_daemon(place.arena, timeout_s=LIMIT_S, token=TOKEN)
    return gate


def serve(services: Services, is_done: Callable[[], bool]) -> None:
    """Serve until something is so."""
    end_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < end_s
        services.serve(0.5)


def start(
    place: Place, service: Service, *, is_joining: bool = False
) -> tuple[Services, list[str]]:
    """Start a service, and return once it is ready or has failed; with what was said then."""
    services = Services([service], place.said.append, place.note, is_joining=is_joining)
    told: list[str] = []
    services.begin(lambda: told.append("ready"), told.append)
    serve(services, lambda: bool(told))
    return services, told


def make_store(folder: Path) -> Path:
    """Return where a store can be."""
    (folder / "disk").mkdir()
    return folder / "disk" / "store"


def break_store(store: Path) -> None:
    """Have a store refuse whatever it is asked for, as root's own rights do not."""
    shutil.rmtree(store.parent)
    store.parent.write_bytes(b"")

"""Real daemons beside an agent: started, killed, stopped, found again, and ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from resilience.agent.services.memoryd import memoryd_service
from resilience.agent.services.services import Service, Services
from resilience.agent.services.supervision import ServiceLimits
from resilience.node_config import MemorydConfig, NodeConfig
from resilience.settings import RamTier, StoreTier
from resilience.tiered.client import TieredClient
from tests.processes import command_of, wait_for_end
from tests.resilience.agent.runs import PROGRAM, Run, plan
from tests.resilience.tiered.daemons import load, make_content, make_id, save

LIMIT_S = 60.0
RAM = RamTier(
    every_n_steps=1, every_s=None, keep=1, replicas=0, domains_min=1, budget_mib=None,
    peers_hold="copies",
)  # fmt: skip
STORE = StoreTier(
    url=None, every_n_steps=1, every_s=None, keep=None, waiting_max=None, deadline_s=5.0,
    endpoint=None, region=None, path_style=False, part_size_mib=None, attempts=None,
)  # fmt: skip


@dataclass
class Place:
    """Where the daemon of a node is, and what is said of it."""

    folder: Path
    arena: Path
    said: list[str] = field(default_factory=list)

    def write(
        self, *, lease_s: float = 60.0, is_external: bool = False, store: Path | None = None
    ) -> MemorydConfig:
        """Write what agent and daemon are told."""
        config = MemorydConfig(
            is_external=is_external, budget_mib=16, ram=RAM, http_port=None, lease_s=lease_s,
            store=STORE.model_copy(update={"url": f"folder:{store}"}) if store else None,
            drain_s=2.0,
        )  # fmt: skip
        text = NodeConfig(agent=None, memoryd=config).to_json()
        (self.folder / "node.json").write_text(text)
        return config

    def service(self, *more: str, config: MemorydConfig | None = None) -> Service:
        return memoryd_service(
            config or self.write(),
            path=self.folder / "node.json",
            node="n0",
            log=self.folder / "memoryd.log",
            more=more,
            variables=self.variables(),
        )

    def variables(self) -> dict[str, str]:
        return {
            "MEMORYD_DIR": str(self.arena),
            "MEMORYD_TOKEN_FILE": str(self.folder / "token"),
        }

    def client(self) -> TieredClient:
        return TieredClient(self.arena / "memoryd.sock", token="t", namespace="run", job="job")

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


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "token").write_text("t")
    arena = Path(f"/dev/shm/memoryd-test-{os.getpid()}-{tmp_path.name[-20:]}")
    place = Place(tmp_path, arena)
    yield place
    for pid in place.daemons():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(arena, ignore_errors=True)


def serve(services: Services, is_done: Callable[[], bool]) -> None:
    """Serve until something is so."""
    end_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < end_s
        services.serve(0.5)


def start(place: Place, service: Service) -> tuple[Services, list[str]]:
    """Start a service, and return once it is ready or has failed; with what was said then."""
    services = Services([service], place.said.append)
    told: list[str] = []
    services.begin(lambda: told.append("ready"), told.append)
    serve(services, lambda: bool(told))
    return services, told


def test_daemon_is_ready_before_work_begins_and_gone_after_it(place: Place) -> None:
    services, told = start(place, place.service())

    assert told == ["ready"]
    assert place.daemons() == [place.pid()]
    assert os.getsid(place.pid()) == place.pid()

    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()
    assert place.said == []


def test_end_without_success_leaves_the_checkpoints_for_the_next_start(place: Place) -> None:
    content = make_content(100_000, 7)
    services, _ = start(place, place.service())
    with place.client() as client:
        save(client, make_id(), content)
    services.end(removes=False)
    assert place.daemons() == []

    services, _ = start(place, place.service())

    with place.client() as client:
        assert load(client, make_id()) == content
    services.end(removes=True)


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_daemon_that_is_killed_again_and_again_is_there_again_with_what_it_held(
    place: Place, tmp_path: Path, num_kills: int
) -> None:
    """Also while it sends to a store, and while it is just starting."""
    rng = random.Random(1)
    config = place.write(store=tmp_path / "store")
    service = place.service(config=config)
    services, _ = start(place, replace(service, limits=ServiceLimits(short_lives_max=100)))
    content = make_content(1 << 20, 3)
    with place.client() as client:
        save(client, make_id(), content)
    for _ in range(num_kills):
        before = place.pid()
        os.kill(before, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
        if rng.random() < 0.5:
            # A drain takes a moment, in which the kill may come.
            end_s = time.monotonic() + rng.random()
            while time.monotonic() < end_s:
                services.serve(0.05)
            for pid in place.daemons():
                os.kill(pid, signal.SIGKILL)
        wait_for_end(before)
        num_ready = place.log().count("is ready")
        serve(services, lambda: place.log().count("is ready") > num_ready)  # noqa: B023

        with place.client() as client:
            assert load(client, make_id()) == content
    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()


def test_wrong_command_is_given_up_with_its_words(place: Place) -> None:
    services, (told,) = start(place, place.service("--http=nowhere"))

    assert told.startswith("memoryd was started with a wrong command (exit status 2); its last")
    assert "--http: 'nowhere' is not HOST:PORT" in told
    services.end(removes=False)


def test_wrong_file_is_given_up_with_its_words(place: Place) -> None:
    service = place.service()
    text = (place.folder / "node.json").read_text()
    (place.folder / "node.json").write_text(text.replace('"keep": 1', '"keep": 0'))

    services, (told,) = start(place, service)

    assert "memoryd.ram.keep 0: Input should be greater than or equal to 1" in told
    services.end(removes=False)


def test_daemon_that_never_answers_is_given_up_and_ended(place: Place) -> None:
    silent = (sys.executable, "-c", "print('busy'); import time; time.sleep(1e6)")
    service = replace(place.service(), command=silent, limits=ServiceLimits(ready_s=2.0))

    services, (told,) = start(place, service)

    assert told.startswith("memoryd did not answer within 2 s")
    services.end(removes=False)
    assert place.daemons() == []


def test_daemon_that_stands_still_is_ended_by_force(place: Place) -> None:
    service = replace(place.service(), limits=ServiceLimits(end_s=1.0))
    services, _ = start(place, service)
    os.kill(place.pid(), signal.SIGSTOP)

    services.end(removes=False)

    assert place.daemons() == []
    assert place.said == ["memoryd did not end in time, and was killed"]
    assert place.arena.is_dir()


def test_nothing_is_left_of_a_daemon_that_stands_still_when_its_job_has_succeeded(
    place: Place,
) -> None:
    service = replace(place.service(), limits=ServiceLimits(remove_s=1.0))
    services, _ = start(place, service)
    os.kill(place.pid(), signal.SIGSTOP)

    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()


def test_nothing_is_left_of_a_daemon_that_was_given_up_when_its_job_has_succeeded(
    place: Place,
) -> None:
    service = replace(place.service(), limits=ServiceLimits(short_lives_max=1))
    services, _ = start(place, service)
    os.kill(place.pid(), signal.SIGKILL)
    serve(services, lambda: any("is given up" in each for each in place.said))

    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()


def test_memory_of_a_daemon_that_just_died_is_removed_by_another(place: Place) -> None:
    services, _ = start(place, place.service())
    pid = place.pid()
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)

    services.end(removes=True)

    assert place.daemons() == []
    assert not place.arena.exists()


# The process is another agent's, which waits for it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_second_agent_takes_a_daemon_over_and_the_first_leaves_it_alone(place: Place) -> None:
    first, _ = start(place, place.service())
    pid = place.pid()

    second, told = start(place, place.service())
    serve(first, lambda: len(place.said) == 2)

    assert told == ["ready"]
    assert place.pid() == pid
    assert place.said[0] == "memoryd of an earlier agent goes on"
    assert "taken over by another agent" in place.said[1]
    first.end(removes=True)
    assert place.pid() == pid
    second.end(removes=True)
    assert place.daemons() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_daemon_of_another_start_is_replaced(place: Place) -> None:
    first, _ = start(place, place.service("--connections-max=7"))
    content = make_content(1000)
    with place.client() as client:
        save(client, make_id(), content)
    pid = place.pid()

    second, told = start(place, place.service())

    assert told == ["ready"]
    assert place.pid() != pid
    with place.client() as client:
        assert load(client, make_id()) == content
    second.end(removes=True)
    first.end(removes=False)


def test_daemon_of_somebody_by_hand_is_not_touched(place: Place) -> None:
    """It has no lease, so nobody's agent has started it."""
    service = place.service()
    unleased = tuple(each for each in service.arguments if not each.startswith("--lease-s"))
    by_hand = replace(service, arguments=unleased)
    first, (told,) = start(place, by_hand)

    assert "the daemon has no lease" in told
    first.end(removes=False)


def test_external_daemon_is_waited_for(place: Place) -> None:
    config = place.write(is_external=True)
    service = place.service(config=config)
    services = Services([service], place.said.append)
    told: list[str] = []
    services.begin(lambda: told.append("ready"), told.append)
    services.serve(0.1)
    assert told == []

    theirs, _ = start(place, place.service())
    serve(services, lambda: bool(told))

    assert told == ["ready"]
    services.end(removes=True)
    assert place.daemons() == [place.pid()]
    theirs.end(removes=True)


def start_agent(run: Run, place: Place) -> None:
    """Start an agent whose program goes on until it is ended."""
    run.start(
        "n0", "--config", str(place.folder / "node.json"), "--nproc-per-node", "1",
        "--spares", "0", variables={**plan(STEPS=1_000_000), **place.variables()},
        program=(str(PROGRAM),),
    )  # fmt: skip


def wait_for_steps(run: Run) -> None:
    """Return once the workers are at work."""
    end_s = time.monotonic() + LIMIT_S
    while not run.resumed():
        assert time.monotonic() < end_s, run.show()
        assert run.agents["n0"].poll() is None, run.show()
        time.sleep(0.1)


def test_daemon_outlives_a_killed_agent_until_the_next_one_finds_it(run: Run, place: Place) -> None:
    place.write()
    start_agent(run, place)
    wait_for_steps(run)
    pid = place.pid()
    run.agents["n0"].kill()
    run.agents["n0"].wait()
    (run.folder / "out" / "resumed.jsonl").unlink()

    start_agent(run, place)
    wait_for_steps(run)

    assert place.pid() == pid
    assert "resilience.agent n0: memoryd of an earlier agent goes on" in run.text()
    run.agents["n0"].terminate()
    assert run.wait() == 143, run.show()
    wait_for_end(pid)
    assert place.daemons() == []
    assert place.arena.is_dir()


def test_daemon_whose_agent_does_not_come_back_ends_with_its_lease(place: Place) -> None:
    service = place.service(config=place.write(lease_s=1.0))
    with place.service().log.open("wb") as log:
        daemon = subprocess.Popen([*service.command, *service.arguments], stderr=log)

        assert daemon.wait(LIMIT_S) == 0

    assert "no agent has come back for 1 s; the daemon ends" in place.log()
    assert place.daemons() == []
    assert [each.name for each in place.arena.iterdir() if each.name != "lock"] == []

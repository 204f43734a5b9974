"""What hundreds of links cost: what they tell is made once, and few of them look at others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.memoryd import peer_targets, peers
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_house import PeerHouse
from resilience.tiered.memoryd.peer_link import Link, Talk
from resilience.tiered.memoryd.peer_options import PeerSettings
from resilience.tiered.memoryd.peer_origins import Origins
from resilience.tiered.memoryd.peer_targets import Targets
from resilience.tiered.memoryd.peers import PeerDoor
from resilience.tiered.placement import Node
from resilience.tiered.vault import Vault
from tests.ports import free_ports
from tests.resilience.tiered.daemons import LIMIT_S, MIB, make_content, make_id
from tests.resilience.tiered.kept import wait_until
from tests.resilience.tiered.vaults import put

NUM_NODES = 40
GONE_S = 1000.0
CONTENT = make_content(1000)


class Connection:
    """The other end of a link, which agrees to everything."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(message)
        return {"is_held": True}

    def names(self) -> set[int]:
        """Return the steps of which it was told."""
        return {row.meta_id.step for each in self.asked for row in each.get("copies", ())}


class Counted:
    """Notes that count how often they were asked for, and by how many threads looked at."""

    def __init__(self) -> None:
        self.num_told = 0

    def tell(self) -> Mapping[str, Any]:
        self.num_told += 1
        return {"runs": {}}

    def hear(self, node: str, notes: Mapping[str, Any]) -> None:
        raise AssertionError(f"{node} says {notes}")


class Scene:
    """One node with a link to each of many, all of them there."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        arena = Arena(folder, MIB)
        opened.callback(arena.close)
        self.vault = Vault(arena)
        nodes = [Node(name=f"n{each:02}", domain=f"n{each:02}") for each in range(NUM_NODES)]
        self.settings = PeerSettings(
            own=nodes[0], listen=("127.0.0.1", 1), peers=tuple(nodes[1:]), gone_s=GONE_S
        )
        self.directory = Directory(nodes[1:], gone_s=GONE_S, on_change=lambda: None)
        self.notes = Counted()
        self.house = PeerHouse(
            vault=self.vault, settings=self.settings, directory=self.directory,
            origins=Origins(folder), boot="1", begin=self.vault.begin, notes=self.notes,
        )  # fmt: skip
        self.vault.on_change = self.directory.wake
        self.sessions: dict[str, object] = {}
        for each in nodes[1:]:
            session = self.sessions[each.name] = object()
            self.directory.enter(each, "1", session)
            self.directory.take(each.name, session, [], is_first=True, is_last=True)
        self.links = {each.name: Connection() for each in nodes[1:]}
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(name,), daemon=True) for name in self.links
        ]
        opened.callback(self.close)
        for thread in self._threads:
            thread.start()
        wait_until(lambda: all(each.asked for each in self.links.values()))

    def _talk(self, name: str) -> None:
        connection: Any = self.links[name]
        Talk(self.house, name, connection, {}, print).go_on(self._is_closed)

    def commit(self, step: int) -> None:
        put(self.vault, make_id(step), b"%d" % step)

    def wait_told(self, steps: set[int]) -> None:
        wait_until(lambda: all(each.names() == steps for each in self.links.values()))

    def close(self) -> None:
        self._is_closed.set()
        self.directory.wake()
        for thread in self._threads:
            thread.join(LIMIT_S)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as opened:
        yield Scene(tmp_path / "arena", opened)


def test_what_is_told_to_all_is_made_once(scene: Scene) -> None:
    before = scene.notes.num_told
    for step in range(3):
        scene.commit(step)
    scene.wait_told({0, 1, 2})

    # Once for each change, and here and there because what is told may not grow old.
    assert scene.notes.num_told - before < NUM_NODES


def test_what_others_hold_wakes_only_links_that_send(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.commit(1)
    scene.wait_told({1})
    looking: set[str] = set()
    views = scene.directory.views

    def counted(*args: Any) -> Any:
        looking.add(threading.current_thread().name)
        return views(*args)

    names = {thread.name for thread in scene._threads}
    rounds: list[str] = []
    own_state = PeerHouse.own_state

    def state(house: PeerHouse) -> Any:
        rounds.append(threading.current_thread().name)
        return own_state(house)

    monkeypatch.setattr(scene.directory, "views", counted)
    monkeypatch.setattr(PeerHouse, "own_state", state)
    (target,) = scene.house.targets.names()
    for name, session in scene.sessions.items():
        scene.directory.change(name, session, [], [])
    wait_until(lambda: bool(looking))

    assert looking < names
    assert len(looking) == 1
    assert set(rounds) == looking
    assert any(each["op"] == "push" for each in scene.links[target].asked)


def test_many_nodes_that_come_are_placed_once_they_have_settled() -> None:
    now_s = [0.0]
    peers = [Node(name=f"n{each:03}", domain="") for each in range(100)]
    own = Node(name="own", domain="own")
    settings = PeerSettings(own=own, listen=("127.0.0.1", 1), peers=tuple(peers))
    directory = Directory(peers, gone_s=10, on_change=lambda: None, clock=lambda: now_s[0])
    targets = Targets(directory, settings, clock=lambda: now_s[0])
    (first,) = targets.names()
    assert targets.rest_s() is None

    directory.enter(Node(name=first, domain="own"), "1", object())
    assert targets.names() == {first}
    assert targets.rest_s() == 1.0
    now_s[0] = 1.0
    assert not targets.names() & {first}, "it turned out to be of this failure domain"
    assert targets.rest_s() is None


def test_links_that_ask_together_have_their_targets_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = tuple(Node(name=f"n{number}", domain=f"d{number}") for number in range(1, 16))
    settings = PeerSettings(own=Node(name="n0", domain="d0"), listen=("127.0.0.1", 1), peers=peers)
    directory = Directory(peers, gone_s=10.0, on_change=lambda: None)
    targets, begin, calls = Targets(directory, settings), threading.Barrier(8), []
    choose = peer_targets.choose_targets

    def counted(*given: Any, **options: Any) -> frozenset[str]:
        calls.append(1)
        return choose(*given, **options)

    def ask() -> frozenset[str]:
        begin.wait()
        return targets.names()

    monkeypatch.setattr(peer_targets, "choose_targets", counted)
    with ThreadPoolExecutor(8) as pool:
        found = [each.result() for each in [pool.submit(ask) for _ in range(8)]]

    assert found == found[:1] * 8
    assert len(calls) == 1


def test_who_cannot_be_connected_to_is_not_waited_for(tmp_path: Path) -> None:
    listen, nobody = free_ports(2)
    peer = Node(name="b", domain="b", address=f"127.0.0.1:{nobody}")
    settings = PeerSettings(
        own=Node(name="a", domain="a"), listen=("127.0.0.1", listen), peers=(peer,)
    )
    arena = Arena(tmp_path / "arena", MIB)
    door = PeerDoor(Vault(arena), tmp_path / "arena", settings)
    directory = door._directory
    session = object()
    directory.enter(Node(name="b", domain="b"), "1", session)
    directory.take("b", session, [], is_first=True, is_last=True)
    door.start()
    door.wake()

    assert list(door.living()) == ["b"]
    assert door.wait_told(LIMIT_S)
    door.close()
    arena.close()


def test_name_of_a_node_that_does_not_resolve_is_told_after_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    peer = Node(name="b", domain="b", address="b.run:29501")
    listen = ("127.0.0.1", *free_ports(1))
    settings = PeerSettings(own=Node(name="a", domain="a"), listen=listen, peers=(peer,))
    arena = Arena(tmp_path / "arena", MIB)
    door = PeerDoor(Vault(arena), tmp_path / "arena", settings)
    door.start()

    wait_until(lambda: bool(door._house.nameless))
    before = door.nameless()
    monkeypatch.setattr(peers, "NAMELESS_S", 0.0)
    after = door.nameless()
    door.close()
    arena.close()

    assert (before, after) == ([], ["b.run:29501"])
    assert (
        "node b: b.run:29501: its name does not resolve: Name or service" in capfd.readouterr().err
    )


def test_a_link_connects_though_it_may_not_be_less_urgent(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    dialed = threading.Event()

    def dial(*_: Any, **__: Any) -> Any:
        dialed.set()
        raise ConnectionRefusedError

    monkeypatch.setattr("os.setpriority", refuse)
    monkeypatch.setattr(PeerHouse, "dial", dial)
    link = Link(scene.house, scene.settings.peers[0].name)
    link.start()
    assert dialed.wait(LIMIT_S)
    link.close()
    link.join(0.0, LIMIT_S)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[dict[str, Vault], list[PeerDoor]]]:
    """The memory of two nodes, and their doors, which are not open yet."""
    ports = dict(zip("ab", free_ports(2), strict=True))
    nodes = {
        name: Node(name=name, domain=name, address=f"127.0.0.1:{port}")
        for name, port in ports.items()
    }
    with ExitStack() as opened:
        found: dict[str, Vault] = {}
        doors: list[PeerDoor] = []
        for name, other in ("ab", "ba"):
            arena = Arena(tmp_path / name, MIB)
            opened.callback(arena.close)
            found[name] = Vault(arena)
            settings = PeerSettings(
                own=nodes[name], listen=("127.0.0.1", ports[name]), peers=(nodes[other],)
            )
            doors.append(PeerDoor(found[name], tmp_path / name, settings))
        for door in doors:
            opened.callback(door.close)
        yield found, doors


def damage_once(vault: Vault) -> list[bool]:
    """Damage the first shard that comes and find it out at once, before anybody is told."""
    found: list[bool] = []
    is_damaged = False

    def check() -> None:
        nonlocal is_damaged
        if not is_damaged and vault.find(make_id()):
            # Before the rest, which comes here again.
            is_damaged = True
            with vault.read(make_id()) as reading:
                reading.segment.memory[0] ^= 1
            found.append(vault.check(make_id()))

    vault.on_change = check
    return found


def test_a_copy_that_was_damaged_before_it_was_told_of_comes_again(
    pair: tuple[dict[str, Vault], list[PeerDoor]],
) -> None:
    found, doors = pair
    checks = damage_once(found["b"])
    for door in doors:
        door.start()
    put(found["a"], make_id(), CONTENT)

    wait_until(lambda: bool(checks) and found["b"].find(make_id()) is not None)
    assert checks == [False]
    with found["b"].read(make_id()) as reading:
        assert bytes(reading.memory) == CONTENT

"""What a node has had for so short a time that it never told anybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.catalog import Copy
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_options import PeerSettings
from resilience.tiered.memoryd.peers import PeerDoor
from resilience.tiered.placement import Node
from resilience.tiered.vault import Vault
from tests.ports import free_ports
from tests.resilience.tiered.cluster import wait_until
from tests.resilience.tiered.daemons import MIB, make_content, make_id, make_meta

ONE = make_id(1)
CONTENT = make_content(1000)
COPY = Copy(meta_id=ONE, num_shards=1, digest="d", num_bytes=8, place="b", tier="ram")


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
        if not is_damaged and vault.find(ONE):
            # Before the rest, which comes here again.
            is_damaged = True
            with vault.read(ONE) as reading:
                reading.segment.memory[0] ^= 1
            found.append(vault.check(ONE))

    vault.on_change = check
    return found


def test_a_copy_that_was_damaged_before_it_was_told_of_comes_again(
    pair: tuple[dict[str, Vault], list[PeerDoor]],
) -> None:
    found, doors = pair
    checks = damage_once(found["b"])
    for door in doors:
        door.start()
    with found["a"].begin(ONE, len(CONTENT)) as writing:
        writing.memory[:] = CONTENT
        writing.commit(make_meta(ONE, CONTENT))

    wait_until(lambda: bool(checks) and found["b"].find(ONE) is not None)
    assert checks == [False]
    with found["b"].read(ONE) as reading:
        assert bytes(reading.memory) == CONTENT


def make_directory() -> tuple[Directory, object]:
    directory = Directory([Node(name="b", domain="b")], gone_s=1000.0, on_change=lambda: None)
    session = object()
    directory.enter("b", "1", session, domain="b", switch="")
    directory.take("b", session, [], is_first=True, is_last=True)
    return directory, session


def test_what_a_node_said_after_it_got_a_copy_counts_more_than_having_sent_it() -> None:
    directory, session = make_directory()
    version = directory.version("b")
    directory.change("b", session, [COPY], [])
    directory.change("b", session, [], [ONE])
    directory.note_copy("b", COPY, version)

    assert directory.copies({}) == []
    assert directory.views({})[0].dropped == {ONE}


def test_what_a_node_has_dropped_before_it_told_of_it_is_not_sent_again() -> None:
    directory, session = make_directory()
    directory.change("b", session, [], [ONE])
    assert directory.views({})[0].dropped == {ONE}

    directory.lose("b", [ONE])
    assert directory.views({})[0].dropped == frozenset()

"""Daemons that were started after the others, which were not told of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.placement import Node
from tests.ports import free_ports
from tests.resilience.tiered.cluster import count_held, load_own, wait_held
from tests.resilience.tiered.daemons import MIB, Daemon, ask, make_content, make_id, save
from tests.resilience.tiered.kept import lose_memory, wait_until
from tests.resilience.tiered.memoryd.test_peers import connect, hello

OWN = "abcd"
KNOWN = {"a": "ab", "b": "ab", "c": "abc", "d": "abcd"}
"""Who is in each one's file: two of the run's own job, and two that were added one by one."""


@contextmanager
def nodes(folder: Path, *options: str) -> Iterator[tuple[dict[str, Daemon], dict[str, int]]]:
    """Make four nodes that are not started, each with a file of those that it knows."""
    ports = dict(zip(OWN, free_ports(len(OWN)), strict=True))
    with ExitStack() as stack:
        found = {}
        for name in OWN:
            file = folder / f"peers-{name}"
            file.write_text("".join(f"{each}=127.0.0.1:{ports[each]}\n" for each in KNOWN[name]))
            words = (
                *("--node", name, "--peer-listen", f"127.0.0.1:{ports[name]}"),
                *("--peers-file", str(file), "--peer-gone-s", "2", *options),
            )
            daemon = Daemon(folder=folder / name, budget_mib=64, options=words)
            found[name] = stack.enter_context(daemon)
        yield found, ports


def test_a_node_that_comes_is_given_copies_and_gives_its_own(tmp_path: Path) -> None:
    with nodes(tmp_path, "--replicas", "3") as (found, _):
        for name in "ab":
            found[name].start()
        save(found["a"].client(), make_id(1), make_content(MIB, 1))
        wait_held(found["b"], make_id(1))

        for name in "cd":
            found[name].start()
        wait_held(found["c"], make_id(1))
        wait_held(found["d"], make_id(1))
        save(found["c"].client(), make_id(2), make_content(MIB, 2))
        for name in "abd":
            wait_held(found[name], make_id(2))
            assert load_own(found[name], make_id(2)) == make_content(MIB, 2)


def test_what_a_node_that_came_has_lost_comes_back_from_one_that_was_not_told_of_it(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path) as (found, _):
        for name in "abc":
            found[name].start()
        save(found["c"].client(), make_id(), make_content(MIB))
        wait_until(lambda: any(count_held(found[name], make_id()) for name in "ab"))

        lose_memory(found["c"])
        with found["c"].start().client() as client:
            assert [each.step for each in client.steps()] == [1]
            with client.read(step=1, generation=0, shard="0") as loan:
                assert bytes(loan.memory) == make_content(MIB)


def test_a_node_that_began_anew_gets_to_know_again_who_came(tmp_path: Path) -> None:
    with nodes(tmp_path, "--replicas", "2") as (found, _):
        for name in "abc":
            found[name].start()
        lose_memory(found["a"])
        found["a"].start()
        save(found["c"].client(), make_id(), make_content(MIB))
        wait_held(found["a"], make_id())
        wait_held(found["b"], make_id())


def test_who_does_not_introduce_itself_is_refused_and_not_remembered(tmp_path: Path) -> None:
    with nodes(tmp_path) as (found, ports):
        found["a"].start()
        for message, answer in (
            (hello(node="c"), "none of the peers"),
            (hello(node="c", address=""), "none of the peers"),
            (hello(node="a", address="127.0.0.1:1"), "node 'a' is none of the peers"),
            (hello(node="c", address="nowhere"), "'nowhere' is not HOST:PORT"),
            (hello(node="c", address=7), "7 is no text"),
            (hello(node="c", address="127.0.0.1:1", token="wrong"), "wrong token"),
        ):
            connection = connect(ports["a"])
            assert answer in ask(connection, message)["message"]
            connection.close()

        found["c"].start()
        save(found["c"].client(), make_id(), make_content(MIB))
        wait_held(found["a"], make_id())


def test_a_node_that_is_added_is_awaited_and_then_there() -> None:
    now_s = 0.0
    directory = Directory(
        [Node(name="b", domain="b")], gone_s=10.0, on_change=lambda: None, clock=lambda: now_s
    )
    directory.add(Node(name="c", domain="", address="127.0.0.1:1"))

    assert directory.find("c") == Node(name="c", domain="c", address="127.0.0.1:1")
    assert directory.find("d") is None
    assert [each.name for each in directory.nodes()] == ["b", "c"]
    assert directory.missing() == ["b", "c"]
    session = object()
    directory.enter("c", "1", session, domain="rack", switch="")
    directory.take("c", session, [], is_first=True, is_last=True)
    assert directory.living() == {"c": "rack"}
    assert directory.missing() == ["b"]
    now_s = 11.0
    assert directory.living() == {}
    assert directory.nodes() == []


def test_a_node_that_comes_back_at_another_address_is_found_there(tmp_path: Path) -> None:
    with nodes(tmp_path, "--replicas", "2") as (found, ports):
        for name in "abc":
            found[name].start()
        save(found["a"].client(), make_id(1), make_content(MIB, 1))
        wait_held(found["c"], make_id(1))

        lose_memory(found["c"])
        (port,) = free_ports(1)
        file = tmp_path / "peers-c"
        file.write_text(file.read_text().replace(str(ports["c"]), str(port)))
        found["c"].start("--peer-listen", f"127.0.0.1:{port}")
        save(found["a"].client(), make_id(2), make_content(MIB, 2))
        wait_held(found["c"], make_id(2))
        assert load_own(found["c"], make_id(2)) == make_content(MIB, 2)

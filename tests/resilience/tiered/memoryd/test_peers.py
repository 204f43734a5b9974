"""Shards that are soon on other nodes, between real daemons."""

from __future__ import annotations

import itertools
import json
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from resilience.runtime.door import (
    DAEMONS,
    NAME_BYTES,
    NONCE_BYTES,
    SPEAKS_PLAIN,
    SPEAKS_TLS,
    Door,
)
from resilience.runtime.records import fields_of
from resilience.runtime.server import Passage
from resilience.tiered.errors import RefusedError
from resilience.tiered.frames import FrameSocket
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.placement import Node
from tests.cases import slow
from tests.ports import free_ports
from tests.processes import stopped
from tests.resilience.tiered.cluster import Cluster, count_held, load_own, make_cluster, wait_held
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    ask,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.kept import lose_memory, wait_until
from tests.tokens import write_token

KEEP = ("--keep", "8")
TOKEN = "a token that no stranger knows"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    with make_cluster(tmp_path, options=KEEP) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A pair for those who are told something and change nothing."""
    with make_cluster(tmp_path_factory.mktemp("lasting")) as cluster:
        cluster.start()
        yield cluster


def hello(**changes: object) -> dict[str, object]:
    node = {"name": changes.pop("node", "b"), "domain": "", "address": changes.pop("address", "")}
    return {"op": "hello", "version": 3, "node": node, "boot": "1", "is_link": False} | changes


def knock(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def make_door(token: str = "", *, connects: bool = True) -> Door:
    name, nonce = secrets.token_bytes(NAME_BYTES), secrets.token_bytes(NONCE_BYTES)
    return Door(DAEMONS, token, name=name, nonce=nonce, connects=connects)


def connect(port: int, token: str = "") -> FrameSocket:
    """Return a connection that has passed the door."""
    return FrameSocket(Passage(knock(port), make_door(token)).go_through(LIMIT_S))


def test_a_saved_shard_is_on_the_peer(pair: Cluster) -> None:
    for step, num_bytes in enumerate((0, 1, 8 * MIB, 17 * MIB + 3)):
        content = make_content(num_bytes)
        save(pair["a"].client(), make_id(step), content)

        wait_held(pair["b"], make_id(step))
        assert load_own(pair["b"], make_id(step)) == content


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["a", "b"])
def test_a_daemon_killed_in_mid_replication(tmp_path: Path, killed: str) -> None:
    content = make_content(24 * MIB)
    with make_cluster(tmp_path, wired=[("a", "b")], options=KEEP) as cluster:
        wire = cluster.wires["a", "b"]
        wire.stop_at = 12 * MIB
        cluster.start()
        save(cluster["a"].client(), make_id(), content)
        assert wire.is_stopped.wait(LIMIT_S)
        assert count_held(cluster["b"], make_id()) == 0
        cluster[killed].kill()
        assert killed == "b" or count_held(cluster["b"], make_id()) == 0
        wire.go_on()
        cluster.start(killed)

        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        assert load_own(cluster["a"], make_id()) == content


@pytest.mark.parametrize("flips", [[5 * MIB], slow([5 * MIB, 28 * MIB])])
def test_a_flipped_bit_is_asked_for_again(tmp_path: Path, flips: list[int]) -> None:
    """A piece that is wrong twice is refused, and its shard sent later."""
    content, is_once = make_content(24 * MIB), len(flips) == 1
    with make_cluster(tmp_path, wired=[("a", "b")], options=KEEP) as cluster:
        wire = cluster.wires["a", "b"]
        wire.flip_at = [*flips]
        cluster.start()
        save(cluster["a"].client(), make_id(), content)

        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        assert wire.flip_at == []
        assert (wire.bytes_up < 33 * MIB) == is_once, "one piece was sent twice"
        cluster["b"].end()
        assert ("did not come intact" in cluster["b"].outputs[-1]) != is_once


def test_equal_content_is_not_sent(tmp_path: Path) -> None:
    content = make_content(24 * MIB)
    with make_cluster(tmp_path, wired=[("a", "b"), ("b", "a")], options=KEEP) as cluster:
        cluster.start()
        save(cluster["b"].client("twin"), make_id(name="twin"), content)
        wait_held(cluster["a"], make_id(name="twin"))
        save(cluster["a"].client(), make_id(), content)

        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        assert sum(each.bytes_up for each in cluster.wires.values()) < 25 * MIB


def test_a_shard_that_does_not_fit_holds_up_no_other(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=KEEP) as cluster:
        cluster["b"].budget_mib = 8
        cluster.start()
        save(cluster["a"].client(), make_id(2), make_content(12 * MIB))
        save(cluster["a"].client(), make_id(1, generation=0), make_content(MIB))

        wait_held(cluster["b"], make_id(1))
        assert count_held(cluster["b"], make_id(2)) == 0


def test_another_jobs_namespace_is_refused(pair: Cluster) -> None:
    own = pair["b"].client("run", job="other")
    own.steps()  # it has the namespace from now on
    save(pair["a"].client(), make_id(), make_content(MIB))
    save(pair["a"].client("free"), make_id(name="free"), make_content(MIB, 1))

    wait_held(pair["b"], make_id(name="free"))
    assert count_held(pair["b"], make_id()) == 0
    save(own, make_id(), make_content(MIB, 2))
    assert load(own, make_id()) == make_content(MIB, 2)


def test_the_shards_job_has_the_namespace_on_the_peer_too(pair: Cluster) -> None:
    save(pair["a"].client(), make_id(), make_content(MIB))
    wait_held(pair["b"], make_id())

    with pytest.raises(RefusedError, match="belongs to the job 'job'"):
        pair["b"].client("run", job="other").steps()


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (hello(node="stranger"), "none of the peers"),
        (hello(version=1), "version 1, where 3 is spoken"),
        ({"op": "ping"}, "the first request has to be hello"),
    ],
)
def test_a_stranger_is_refused(lasting: Cluster, message: dict[str, object], answer: str) -> None:
    connection = connect(lasting.ports["a"])
    reply = ask(connection, message)

    assert reply["error"] == "refused"
    assert answer in reply["message"]
    with pytest.raises(ConnectionError):
        connection.receive(timeout_s=LIMIT_S)
    connection.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "nothing"},
        {"op": "push", "shard": {}, "origin": "b"},
        {"op": "changes", "copies": [1], "gone": []},
        {"op": "fetch", "shard": {**fields_of(make_id()), "namespace": "../up"}},
        {"op": "fetch", "shard": {**fields_of(make_id()), "more": 1}},
    ],
)
def test_a_request_that_makes_no_sense_is_answered_so(
    lasting: Cluster, request_: dict[str, object]
) -> None:
    connection = connect(lasting.ports["a"])
    assert ask(connection, hello())["node"] == "a"

    assert ask(connection, request_)["error"] == "invalid"
    connection.close()


def test_who_has_another_token_gets_nothing(tmp_path: Path) -> None:
    tokens = {name: tmp_path / f"token-{name}" for name in "ab"}
    for name, path in tokens.items():
        path.touch(mode=0o600)
        path.write_text(f"secret of node {name}")
    with make_cluster(tmp_path) as cluster:
        for name, path in tokens.items():
            cluster[name].start("--token-file", str(path))
        save(cluster["a"].client(token="secret of node a"), make_id(), make_content(MIB))
        process = cluster["a"].process
        assert process is not None
        assert process.stderr is not None
        problem = f"no connection to node b: {DAEMONS.unproven}"
        assert any(problem in line for line in process.stderr)
        assert cluster["b"].client(None, token="secret of node b").status()["namespaces"] == {}


def words_of_token(folder: Path) -> tuple[str, ...]:
    write_token(folder / "token", TOKEN)
    return ("--token-file", str(folder / "token"))


@pytest.mark.parametrize("tls", [("--tls",), ()], ids=["tls", "plain"])
def test_a_sniffer_between_nodes_sees_no_shard_under_tls_and_opens_no_daemon_by_what_it_saw(
    tmp_path: Path, tls: tuple[str, ...]
) -> None:
    content, wired = secrets.token_bytes(3 * MIB), [("a", "b"), ("b", "a")]
    options = (*words_of_token(tmp_path), *tls)
    with make_cluster(tmp_path, wired=wired, options=options) as cluster:
        cluster.start()
        for each in cluster.nodes.values():
            each.token = TOKEN
        save(cluster["a"].client(), make_id(), content)
        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        seen = b"".join(bytes(each.seen) for each in cluster.wires.values())
        said = [bytes(each) for wire in cluster.wires.values() for each in (wire.up, wire.seen)]
        said += [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\0\0"]
        for port, each in itertools.product(cluster.ports.values(), said):
            with knock(port) as stranger, suppress(OSError):  # the daemon has ended it
                stranger.sendall(each)
                stranger.shutdown(socket.SHUT_WR)
                while heard := stranger.recv(1 << 16):
                    assert b'"node"' not in heard, "a daemon answers whom it does not know"
        save(cluster["a"].client(), make_id(2), content)
        wait_held(cluster["b"], make_id(2))

    assert len(seen) > len(content)
    parts = (content[:64], content[-64:], b'"op":"push"', b'"node"', DAEMONS.magic)
    assert [each in seen for each in parts] == [not tls] * len(parts)
    assert TOKEN.encode() not in seen
    assert DAEMONS.derive_key(TOKEN) not in seen


def test_daemons_of_which_one_has_tls_say_so(tmp_path: Path) -> None:
    words = words_of_token(tmp_path)
    with make_cluster(tmp_path, options=words) as cluster:
        cluster["a"].start("--tls")
        cluster["b"].start()
        for name, other, problem in (("a", "b", SPEAKS_PLAIN), ("b", "a", SPEAKS_TLS)):
            process = cluster[name].process
            assert process is not None
            assert process.stderr is not None
            line = f"no connection to node {other}: {problem}"
            assert any(line in each for each in process.stderr)


def test_a_daemon_that_ends_is_no_trouble_of_tls(tmp_path: Path) -> None:
    options = (*words_of_token(tmp_path), "--tls", "--peer-gone-s", "1")
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        save(cluster["b"].client(token=TOKEN), make_id(), make_content(MIB))
        cluster["a"].token = TOKEN
        wait_held(cluster["a"], make_id())
        cluster["a"].end()
        process = cluster["b"].process
        assert process is not None
        assert process.stderr is not None
        line = next(each for each in process.stderr if "no connection to node a: " in each)

    assert "the other side has ended the connection" in line


def test_copies_stay_copies_after_a_restart(tmp_path: Path) -> None:
    with make_cluster(tmp_path, "abc", options=(*KEEP, "--peer-gone-s", "1")) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), make_content(MIB))
        others = [cluster["b"], cluster["c"]]
        wait_until(lambda: any(count_held(each, make_id()) for each in others))
        (holder,) = [each for each in others if count_held(each, make_id())]

        rows = json.loads((holder.folder / "copies.json").read_text())
        assert rows == [[fields_of(make_id()), "a"]]
        assert holder.end(signal.SIGTERM) == 0
        assert holder.outputs[-1].count("Traceback") == 0
        assert holder.start().ready.count("1 shards") == 1


def test_a_node_that_began_anew_is_read_over_a_new_connection(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=(*KEEP, "--domains-min", "1", "--replicas", "0")) as pair:
        pair.start()
        reader = pair["a"].client()
        for step in (1, 2):
            save(pair["b"].client(), make_id(step), make_content(MIB, step))
        for step in (1, 2):
            wait_until(lambda: len(reader.steps()) == 2)
            assert load(reader, make_id(step)) == make_content(MIB, step)
            pair["b"].end()
            pair["b"].start()


@pytest.mark.slow
def test_a_peer_that_stands_still_is_gone_until_it_goes_on(tmp_path: Path) -> None:
    options = (*KEEP, "--peer-gone-s", "1", "--domains-min", "1", "--replicas", "1")
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(1), make_content(MIB))
        wait_held(cluster["b"], make_id(1))
        with stopped(cluster["b"].pid):
            save(cluster["a"].client(), make_id(2), make_content(24 * MIB))
            assert cluster["a"].process is not None
            assert cluster["a"].process.stderr is not None
            assert any(
                "no connection to node b: timed out" in line for line in cluster["a"].process.stderr
            )
            assert [each.step for each in cluster["a"].client().steps()] == [2, 1]

        wait_held(cluster["b"], make_id(2))
        assert load_own(cluster["b"], make_id(2)) == make_content(24 * MIB)


OWN = "abcd"
KNOWN = {"a": "ab", "b": "ab", "c": "abc", "d": "abcd"}
"""Nodes in the file of each node: two of the run's own job, and two that were added one by one."""


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
            (hello(node="c", address=7), "the node cannot be read: address 7"),
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
    directory.enter(Node(name="c", domain="rack"), "1", session)
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

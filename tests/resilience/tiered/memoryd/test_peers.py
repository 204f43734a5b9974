"""Shards that are soon on other nodes, between real daemons."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from resilience.tiered.errors import RefusedError
from resilience.tiered.frames import FrameSocket
from tests.ports import free_ports
from tests.processes import stopped
from tests.resilience.tiered.cluster import (
    Cluster,
    count_held,
    load_own,
    make_cluster,
    wait_held,
    wait_until,
)
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    save,
    segments,
)
from tests.resilience.tiered.http_client import Client

KEEP = ("--keep", "8")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    with make_cluster(tmp_path, options=KEEP) as cluster:
        cluster.start()
        yield cluster


def hello(**changes: object) -> dict[str, object]:
    fields = {"op": "hello", "version": 1, "token": "", "node": "b", "boot": "1", "is_link": False}
    return fields | changes


def connect(port: int) -> FrameSocket:
    return FrameSocket(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))


@pytest.mark.parametrize("num_bytes", [0, 1, 8 * MIB, 17 * MIB + 3])
def test_a_saved_shard_is_on_the_peer(pair: Cluster, num_bytes: int) -> None:
    content = make_content(num_bytes)
    save(pair["a"].client(), make_id(), content)

    wait_held(pair["b"], make_id())
    assert load_own(pair["b"], make_id()) == content


def test_each_of_three_has_what_it_is_to_have(tmp_path: Path) -> None:
    with make_cluster(tmp_path, "abc", options=(*KEEP, "--replicas", "2")) as cluster:
        cluster.start()
        contents = {name: make_content(MIB, seed) for seed, name in enumerate("abc")}
        for name, content in contents.items():
            save(cluster[name].client(name), make_id(name=name), content)

        for daemon in cluster.nodes.values():
            wait_held(daemon, *(make_id(name=name) for name in "abc"))
            for name, content in contents.items():
                assert load_own(daemon, make_id(name=name), "job") == content


def test_one_replica_is_one_further_copy(tmp_path: Path) -> None:
    ids = [make_id(step) for step in range(1, 7)]
    with make_cluster(tmp_path, "abc", options=KEEP) as cluster:
        cluster.start()
        others = [cluster["b"], cluster["c"]]
        for id_ in ids:
            save(cluster["a"].client(), id_, make_content(MIB, id_.step))
            wait_until(lambda id_=id_: sum(count_held(each, id_) for each in others) > 0)
        assert [sum(count_held(each, id_) for each in others) for id_ in ids] == [1] * len(ids)
        assert min(len(segments(each.folder)) for each in others) == 0


@pytest.mark.slow
def test_what_a_lost_node_wrote_gets_another_copy(tmp_path: Path) -> None:
    options = (*KEEP, "--peer-gone-s", "1")
    with make_cluster(tmp_path, "abc", options=options) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), make_content(MIB))
        others = [cluster["b"], cluster["c"]]
        wait_until(lambda: any(count_held(each, make_id()) for each in others))
        cluster["a"].kill()

        for each in others:
            wait_held(each, make_id())


def test_a_peer_that_comes_late_gets_what_is_held(tmp_path: Path) -> None:
    ids = [make_id(step, name=name) for name in ("run", "other") for step in (1, 2)]
    with make_cluster(tmp_path, options=(*KEEP, "--domains-min", "1")) as cluster:
        cluster.start("a")
        for each in ids:
            save(cluster["a"].client(each.namespace), each, make_content(MIB, each.step))
        cluster.start("b")

        wait_held(cluster["b"], *ids)


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


def test_a_flipped_bit_is_asked_for_again(tmp_path: Path) -> None:
    content = make_content(24 * MIB)
    with make_cluster(tmp_path, wired=[("a", "b")], options=KEEP) as cluster:
        wire = cluster.wires["a", "b"]
        wire.flip_at = [5 * MIB]
        cluster.start()
        save(cluster["a"].client(), make_id(), content)

        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        assert wire.flip_at == []
        assert wire.bytes_up < 33 * MIB, "one piece was sent twice"


@pytest.mark.slow
def test_a_piece_that_is_wrong_twice_is_refused_and_sent_later(tmp_path: Path) -> None:
    content = make_content(24 * MIB)
    with make_cluster(tmp_path, wired=[("a", "b")], options=KEEP) as cluster:
        cluster.wires["a", "b"].flip_at = [5 * MIB, 28 * MIB]
        cluster.start()
        save(cluster["a"].client(), make_id(), content)

        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content
        cluster["b"].end()
        assert "did not come intact" in cluster["b"].outputs[-1]


def test_a_shard_comes_back_from_the_peer(pair: Cluster) -> None:
    content = make_content(17 * MIB)
    save(pair["a"].client(), make_id(), content)
    wait_held(pair["b"], make_id())
    pair["a"].kill()
    shutil.rmtree(pair["a"].folder)
    pair.start("a")

    # The peer may be quicker and send it by itself.
    wait_until(lambda: bool(pair["a"].client().steps()))
    assert load(pair["a"].client(), make_id()) == content


def test_a_shard_is_fetched(tmp_path: Path) -> None:
    content = make_content(17 * MIB)
    with make_cluster(tmp_path, options=("--replicas", "0", "--domains-min", "1")) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), content)
        wait_until(lambda: bool(cluster["b"].client().steps()))

        with cluster["b"].client().read(step=1, generation=0, shard="0") as loan:
            assert loan.source == "peer:a"
            assert bytes(loan.memory) == content


def test_a_lost_nodes_copies_count_no_more(tmp_path: Path) -> None:
    options = ("--replicas", "0", "--domains-min", "1", "--peer-gone-s", "1")
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        for shard, name in enumerate("ab"):
            shard_id = make_id(shard=str(shard))
            save(cluster[name].client(), shard_id, make_content(MIB, shard), num_shards=2)
        client = cluster["a"].client()
        wait_until(lambda: "b" in client.status()["nodes"])
        wait_until(lambda: bool(client.steps()))
        cluster["b"].kill()

        wait_until(lambda: not client.steps())


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


def test_what_the_http_door_took_is_on_the_peer(tmp_path: Path) -> None:
    content = make_content(MIB)
    with make_cluster(tmp_path) as cluster:
        ports = dict(zip("ab", free_ports(2), strict=True))
        for name, port in ports.items():
            cluster[name].start("--http", f"127.0.0.1:{port}")
            with Client(("127.0.0.1", port)) as client:
                # The second node may have heard of it from the first.
                assert client.create("space", 1).status in (200, 201)
        with Client(("127.0.0.1", ports["a"])) as client:
            assert client.put("space", 0, 5, content).status == 200
        wait_held(cluster["b"], make_id(5, name="http:space"))

        with Client(("127.0.0.1", ports["b"])) as client:
            assert client.get("space", 0, 5).body == content


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, struct.pack(">I", 4) + b"null", b"\0\0"],
)
def test_garbage_is_refused(pair: Cluster, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair.ports["b"]), timeout=LIMIT_S) as stranger:
        stranger.sendall(data)
        # The daemon may have reset the connection before all of it was sent.
        with suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
    save(pair["a"].client(), make_id(), make_content(MIB))
    wait_held(pair["b"], make_id())


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (hello(token="wrong"), "wrong token"),
        (hello(token=7), "the first request has to be hello"),
        (hello(node="stranger"), "none of the peers"),
        (hello(version=2), "version 2, where 1 is spoken"),
        ({"op": "ping"}, "the first request has to be hello"),
    ],
)
def test_a_stranger_is_refused(pair: Cluster, message: dict[str, object], answer: str) -> None:
    connection = connect(pair.ports["a"])
    connection.send(message, timeout_s=LIMIT_S)
    reply = connection.receive(timeout_s=LIMIT_S).message

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
        {"op": "fetch", "shard": ["../up", 1, 0, "0"]},
        {"op": "fetch", "shard": ["run", 1, 0]},
    ],
)
def test_a_request_that_makes_no_sense_is_answered_so(
    pair: Cluster, request_: dict[str, object]
) -> None:
    connection = connect(pair.ports["a"])
    connection.send(hello(), timeout_s=LIMIT_S)
    assert connection.receive(timeout_s=LIMIT_S).message["node"] == "a"
    connection.send(request_, timeout_s=LIMIT_S)

    assert connection.receive(timeout_s=LIMIT_S).message["error"] == "invalid"
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
        assert any("no connection to node b: wrong token" in line for line in process.stderr)
        assert cluster["b"].client(None, token="secret of node b").status()["namespaces"] == {}


def test_without_a_token_it_stays_on_loopback(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "a") as daemon:
        daemon.spawn("--node", "a", "--peer-listen", "0.0.0.0:7000")
        assert daemon.wait() == 2
        assert "needs --token-file" in daemon.outputs[-1]


def make_certificates(folder: Path, *names: str) -> None:
    """Make an authority and a certificate of it for each name."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name in names:
        openssl(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *sign)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_over_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path, "a", "b")
    content = make_content(17 * MIB)
    with make_cluster(tmp_path, options=("--tls-ca", str(tmp_path / "ca.pem"))) as cluster:
        for name in "ab":
            files = (tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
            cluster[name].start("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
        save(cluster["a"].client(), make_id(), content)
        wait_held(cluster["b"], make_id())
        assert load_own(cluster["b"], make_id()) == content

        plain = connect(cluster.ports["a"])
        plain.send(hello(), timeout_s=LIMIT_S)
        with pytest.raises((ConnectionError, ValueError)):
            plain.receive(timeout_s=LIMIT_S)
        plain.close()


def test_copies_stay_copies_after_a_restart(tmp_path: Path) -> None:
    with make_cluster(tmp_path, "abc", options=(*KEEP, "--peer-gone-s", "1")) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), make_content(MIB))
        others = [cluster["b"], cluster["c"]]
        wait_until(lambda: any(count_held(each, make_id()) for each in others))
        (holder,) = [each for each in others if count_held(each, make_id())]

        rows = json.loads((holder.folder / "copies.json").read_text())
        assert rows == [[["run", 1, 0, "0"], "a"]]
        assert holder.end(signal.SIGTERM) == 0
        assert holder.outputs[-1].count("Traceback") == 0
        assert holder.start().ready.count("1 shards") == 1


def test_many_strangers_hold_up_nobody(pair: Cluster) -> None:
    save(pair["a"].client(), make_id(1), make_content(MIB, 1))
    wait_held(pair["b"], make_id(1))
    with ExitStack() as stack:
        for _ in range(300):
            stack.callback(connect(pair.ports["b"]).close)
        save(pair["a"].client(), make_id(2), make_content(MIB, 2))
        wait_held(pair["b"], make_id(2))


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

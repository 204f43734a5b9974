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
from tests.processes import stopped
from tests.resilience.tiered.cluster import Cluster, count_held, load_own, make_cluster, wait_held
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    ask,
    load,
    make_content,
    make_id,
    save,
    segments,
)
from tests.resilience.tiered.kept import wait_until

KEEP = ("--keep", "8")


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
    fields = {"op": "hello", "version": 1, "token": "", "node": "b", "boot": "1", "is_link": False}
    return fields | changes


def connect(port: int) -> FrameSocket:
    return FrameSocket(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))


def test_a_saved_shard_is_on_the_peer(pair: Cluster) -> None:
    for step, num_bytes in enumerate((0, 1, 8 * MIB, 17 * MIB + 3)):
        content = make_content(num_bytes)
        save(pair["a"].client(), make_id(step), content)

        wait_held(pair["b"], make_id(step))
        assert load_own(pair["b"], make_id(step)) == content


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


def test_a_shard_is_fetched(tmp_path: Path) -> None:
    content = make_content(17 * MIB)
    with make_cluster(tmp_path, options=("--replicas", "0", "--domains-min", "1")) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), content)
        wait_until(lambda: bool(cluster["b"].client().steps()))

        with cluster["b"].client().read(step=1, generation=0, shard="0") as loan:
            assert loan.source == "peer:a"
            assert bytes(loan.memory) == content


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


def test_garbage_is_refused(pair: Cluster) -> None:
    null = struct.pack(">I", 4) + b"null"
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, null, b"\0\0"):
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
        {"op": "fetch", "shard": ["../up", 1, 0, "0"]},
        {"op": "fetch", "shard": ["run", 1, 0]},
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
        assert any("no connection to node b: wrong token" in line for line in process.stderr)
        assert cluster["b"].client(None, token="secret of node b").status()["namespaces"] == {}


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
        with pytest.raises((ConnectionError, ValueError)):
            ask(plain, hello())
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

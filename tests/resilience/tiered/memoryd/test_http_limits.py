"""The door over raw sockets: connections, deadlines, the token, and garbage."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from resilience.tiered.memoryd.http_connection import Limits
from tests.resilience.tiered.http_client import (
    DEADLINE_S,
    MIB,
    Client,
    Doors,
    OpenDoor,
    head,
    shard_meta,
    shard_path,
)

# Connections, deadlines, the token

BEARER = {"Authorization": "Bearer secret"}


def post(**headers: str) -> bytes:
    """Return the head of a shard's request."""
    return head("POST", shard_path("job", 0, 1), **headers)


def test_connections_beyond_the_limit_are_503(doors: Doors) -> None:
    with doors.open(limits=Limits(connections_max=2)) as opened:
        first, second = opened.client(), opened.client()
        assert first.create("job", 1).status == 201
        assert second.latest("job") == []
        with opened.client() as third:
            third.send(head("GET", "/health"))
            assert third.answer().status == 503
            assert third.is_ended()
        first.close()
        second.close()


def _eventually_served(opened: OpenDoor, **headers: str) -> None:
    """Wait for a free place: the door has to read first that a client is gone."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        with opened.client() as client:
            client.send(head("GET", "/v1/cp/namespaces/none", **headers))
            if client.answer().status == 404:
                return
        threading.Event().wait(0.02)
    raise AssertionError("no place became free")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"GET /v1/cp/", 408, id="head"),
        pytest.param(
            post(Content_Length="9", Shard_Meta=shard_meta(b"")) + b"half", 408, id="body"
        ),
    ],
)
def test_slow_request_is_408(doors: Doors, sent: bytes, status: int) -> None:
    limits = Limits(head_s=0.05, stall_s=0.05)
    with doors.open(limits=limits) as opened, opened.client() as client:
        client.create("job", 1)
        client.send(sent)
        assert client.answer().status == status
        assert client.is_ended()
        assert opened.vault.metas() == []


def test_body_that_trickles_is_408(doors: Doors) -> None:
    """Each byte comes in time, all of them do not."""
    limits = Limits(stall_s=0.1)
    with doors.open(limits=limits) as opened, opened.client() as client:
        client.create("job", 1)
        client.send(post(Content_Length="1000000",
                         Shard_Meta=shard_meta(b"")))  # fmt: skip
        client.socket.settimeout(0.01)
        while True:
            client.send(b"x")
            try:
                if client.socket.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        client.socket.settimeout(60)
        assert client.answer().status == 408


def test_idle_connection_is_ended(doors: Doors) -> None:
    with doors.open(limits=Limits(idle_s=0.05)) as opened, opened.client() as client:
        client.create("job", 1)
        assert client.is_ended()


def test_client_that_reads_nothing_is_left(doors: Doors) -> None:
    limits = Limits(stall_s=0.1, connections_max=1)
    with doors.open(limits=limits, budget_bytes=128 * MIB) as opened, opened.client() as client:
        client.create("job", 1)
        client.put("job", 0, 1, bytes(60 * MIB))
        client.send(head("GET", shard_path("job", 0, 1)))
        _eventually_served(opened)


def test_token_is_asked_for_on_every_request(doors: Doors) -> None:
    with doors.open(token="secret") as opened, opened.client() as client:
        path = "/v1/cp/namespaces/job"
        for wrong in ("Bearer secre", "Bearer secret2", "secret", "Basic secret", "Bearer \xe9"):
            with opened.client() as other:
                assert other.ask("GET", path, Authorization=wrong).status == 401
                assert other.is_ended()
        assert client.ask("GET", path, Authorization="Bearer secret").status == 404
        refused = client.ask("GET", path)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert client.ask("GET", "/health").content == {"status": "healthy"}


def test_closed_door_ends_its_connections(doors: Doors) -> None:
    with doors.open() as opened:
        client = opened.client()
        assert client.create("job", 1).status == 201
        address = opened.door.address
    assert client.is_ended()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_door_may_be_named_as_a_proxy(http: Client) -> None:
    """A http whose address cannot be set is led here by http_proxy."""
    http.create("job", 1)
    url = "http://ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local:9200"
    assert http.ask("GET", f"{url}/v1/cp/namespaces/job").content["num_ranks"] == 1
    assert http.ask("GET", f"{url}/v1/cp/namespaces/none").status == 404


# Garbage


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"\r\n\r\n", 400, id="nothing"),
        pytest.param(b"hello\r\n\r\n", 400, id="no-http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400, id="tls"),
        pytest.param(b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="two-blanks"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no-host"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, id="version"),
        pytest.param(head("GET", "/") + b"", 404, id="root"),
        pytest.param(head("GET", "/v1/cp/checkpoints/job"), 404, id="unknown-path"),
        pytest.param(head("GET", "/v1/cp/namespaces/job/"), 404, id="slash-behind"),
        pytest.param(head("PUT", "/v1/cp/namespaces/job"), 405, id="method"),
        pytest.param(head("POST", "/v1/cp/checkpoints/job/latest"), 405, id="post-latest"),
        pytest.param(head("GET", "/v1/cp/cluster/reset"), 405, id="get-reset"),
        pytest.param(head("GET", "/v1/cp/namespaces/..%2f..%2fetc"), 400, id="dots-encoded"),
        pytest.param(head("GET", "/v1/cp/namespaces/a%2fb"), 400, id="slash-encoded"),
        pytest.param(head("GET", "/v1/cp/namespaces/%252e"), 400, id="encoded-twice"),
        pytest.param(head("GET", "/v1/cp/namespaces/.."), 400, id="dots"),
        pytest.param(head("GET", "/v1/cp/namespaces/.hidden"), 400, id="dot-first"),
        pytest.param(head("GET", "/v1/cp/namespaces/a\\b"), 400, id="backslash"),
        pytest.param(head("GET", "/v1/cp/namespaces/a%00b"), 400, id="nul-encoded"),
        pytest.param(head("GET", "/v1/cp/namespaces/a\0b"), 400, id="nul"),
        pytest.param(head("GET", "/v1/cp/namespaces/" + "n" * 10_000), 400, id="long-name"),
        pytest.param(head("GET", "/v1/cp/namespaces/"), 400, id="no-name"),
        pytest.param(head("GET", "/v1/cp/checkpoints/job/-1/3"), 400, id="negative-rank"),
        pytest.param(head("GET", "/v1/cp/checkpoints/job/1/3.0"), 400, id="step-no-number"),
        pytest.param(head("GET", f"/v1/cp/checkpoints/job/1/{2**63 - 1}"), 404, id="last-step"),
        pytest.param(head("GET", f"/v1/cp/checkpoints/job/1/{2**63}"), 400, id="huge-step"),
        pytest.param(head("GET", "/v1/cp/checkpoints/job/latest?limit=0"), 400, id="limit"),
        pytest.param(head("POST", "/v1/cp/namespaces/job?num_ranks=0"), 400, id="no-ranks"),
        pytest.param(head("POST", "/v1/cp/namespaces/job"), 400, id="ranks-missing"),
        pytest.param(head("GET", "/" + "a" * 40_000), 431, id="huge-head"),
        pytest.param(head("GET", "/", **{f"X{i}": "y" for i in range(100)}), 431, id="headers"),
        pytest.param(head("GET", "/", X="a\r\nHost: two"), 400, id="host-twice"),
        pytest.param(head("GET", "/", X="a\r\n folded"), 400, id="folded"),
        pytest.param(head("GET", "/", X="a\nb"), 400, id="line-feed"),
        pytest.param(head("GET", "/", X="a\0b"), 400, id="nul-in-header"),
        pytest.param(post(), 411, id="no-length"),
        pytest.param(post(Content_Length="-1"), 400, id="minus"),
        pytest.param(post(Content_Length="1e3"), 400, id="float"),
        pytest.param(post(Transfer_Encoding="chunked"), 501, id="chunked"),
        pytest.param(post(Transfer_Encoding="chunked", Content_Length="1"), 400, id="two-lengths"),
        pytest.param(post(Content_Length="1"), 400, id="no-meta"),
        pytest.param(head("CONNECT", "door:443"), 400, id="tunnel"),
        pytest.param(head("GET", "http://door"), 400, id="proxy-without-path"),
        pytest.param(head("GET", "ftp://door/health"), 400, id="other-scheme"),
        pytest.param(head("GET", "/", Expect="200-maybe"), 417, id="expectation"),
        pytest.param(head("DELETE", "/v1/cp/namespaces/job", Content_Length="1"), 400, id="body"),
    ],
)
def test_garbage_is_refused_and_the_door_lives(
    door: OpenDoor, http: Client, data: bytes, status: int
) -> None:
    http.create("job", 1)
    with door.client() as other:
        other.send(data)
        assert other.answer().status == status
    assert http.latest("job") == []


@pytest.mark.parametrize(
    "meta",
    [
        "", "{", "[]", "1", "null", '{"checksum": "AAAA"}', '{"algorithm": "xxh3_128"}',
        '{"checksum": 1, "algorithm": "xxh3_128"}', '{"checksum": "?", "algorithm": "xxh3_128"}',
        '{"checksum": "AAAA", "algorithm": "xxh3_128"}', "[" * 4000, "x" * 5000,
        json.dumps({"checksum": "A" * 22 + "==", "algorithm": "md5"}),
    ],
)  # fmt: skip
def test_shard_meta_that_is_none_is_refused(http: Client, meta: str) -> None:
    http.create("job", 1)
    assert http.ask("POST", shard_path("job", 0, 1), b"x", Shard_Meta=meta).status == 400


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["Host: 127.0.0.1:9200", "Origin: http://page.example"], id="another-origin"),
        pytest.param(["Host: 127.0.0.1:9200", "Origin: null"], id="file"),
        pytest.param(["Host: page.example:9200"], id="rebound-name"),
        pytest.param(["Host: svc.cluster.local.page.example"], id="name-within"),
    ],
)
def test_web_page_can_have_nothing_done(door: OpenDoor, http: Client, lines: list[str]) -> None:
    """Without a token whoever reaches the port may do all, and a browser reaches it for a page."""
    http.create("job", 1)

    with door.client() as page:
        for target in ("/v1/cp/cluster/reset", "/v1/cp/namespaces/job?num_ranks=9"):
            request = [f"POST {target} HTTP/1.1", *lines, "Content-Length: 0", "", ""]
            page.send("\r\n".join(request).encode())
            assert page.answer().status == 403

    assert http.ask("GET", "/v1/cp/namespaces/job").content["num_ranks"] == 1


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:9200",
        "[::1]:9200",
        "localhost",
        "node-a:9200",
        "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local:9200",
    ],
)
def test_clients_name_the_door_as_they_find_it(http: Client, host: str) -> None:
    http.send(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

    assert http.answer().status == 200


@pytest.mark.parametrize("token", [None, "secret"])
def test_strangers_have_no_threads_and_take_no_place(doors: Doors, token: str | None) -> None:
    """More of them than have places say nothing, half of a request, another protocol, no token."""
    sayings = [
        b"",
        b"GET / HTTP",
        b"\x16\x03\x01" + bytes(300),
        head("GET", "/v1/cp/"),
        b"x" * 40_000,
    ]
    if token is None:
        del sayings[3]
    limits = Limits(connections_max=1)
    with doors.open(token=token, limits=limits) as opened, ExitStack() as clients:
        known = clients.enter_context(opened.client())
        assert known.ask("GET", "/v1/cp/namespaces/job", **BEARER).status == 404
        num_threads = threading.active_count()
        for _ in range(60):
            for each in sayings:
                stranger = clients.enter_context(opened.client())
                stranger.send(each)
        assert known.ask("GET", "/v1/cp/namespaces/job", **BEARER).status == 404
        assert threading.active_count() == num_threads
        with opened.client() as health:
            health.send(head("GET", "/health"))
            assert health.answer().status == (503 if token is None else 200)
        known.close()
        _eventually_served(opened, **BEARER)

"""The operator's port, of an agent that has no run: what it takes, and from whom."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from resilience.agent.operator.commands import BODIES
from tests.resilience.agent.operator.driver import Node, call, start_body
from tests.resilience.agent.runs import listening_ports
from tests.tokens import write_token
from tests.waiting import wait_until

HOSTS = ["10.0.0.1", "10.0.0.2"]
RANKS = [{"rank": rank, "ip": host} for rank, host in enumerate(HOSTS)]


@pytest.fixture
def ready(node: Node) -> Node:
    node.begin()
    return node


def exchange(port: int, *parts: str) -> str:
    """Send the parts of a request as they are, each in its turn, and return the whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part.encode())
            call(port, "/status")  # the port has served what came before
        found = b""
        while data := connection.recv(1 << 16):
            found += data
    return found.decode()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/start", start_body(rank=-1), "rank"),
        ("/start", start_body(rank=True), "rank"),
        ("/start", start_body(rank=2, nnodes=2, rankIps=[]), "rank 2 is not allowed with nnodes 2"),
        ("/update", start_body(1, HOSTS, rankIps=[RANKS[0]]), "rankIps"),
        ("/start", start_body(0, HOSTS, rankIps=[RANKS[0], RANKS[0]]), "rankIps"),
        ("/start", start_body(0, HOSTS, rankIps=[RANKS[0], {**RANKS[0], "rank": 1}]), "rankIps"),
        ("/start", start_body(0, HOSTS, rankIps=[RANKS[0], {**RANKS[1], "rank": 9}]), "rankIps"),
        ("/start", start_body(nnodes=0), "nnodes"),
        ("/start", start_body(rankIps=[{"rank": 0, "ip": "x; reboot"}]), "rankIps"),
        ("/start", start_body(rankIps=[{"rank": 100_001, "ip": "10.0.0.1"}]), "rankIps"),
        ("/start", start_body(log_monitoring_configuration=[{}]), "log_monitoring_configuration"),
        ("/stop", {"timeout": -1}, "timeout"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_its_field(path: str, body: Any, field: str) -> None:
    """Before any state is asked about; tests/scenarios/operators has what AWS's agent refuses."""
    with pytest.raises(ValidationError) as caught:
        BODIES[path].model_validate_json(json.dumps(body))

    found = caught.value.errors()
    texts = [f"{each['loc']} {each['msg']}" for each in found]
    assert any(field in each for each in texts)
    assert all(each["msg"] for each in found)


def test_a_spare_has_a_rank_beyond_and_other_nodes_know_its_address() -> None:
    hosts = [*HOSTS, "10.0.0.3"]
    for rank in range(3):
        body = start_body(rank, hosts, nnodes=2, spare=rank == 2)
        assert BODIES["/start"].model_validate(body)


def test_requests_that_are_none_are_answered_and_change_nothing(ready: Node) -> None:
    port = ready.port
    found = [
        call(port, "/start", {"rank": 0}),
        call(port, "/start", "x" * (2 << 20)),
        call(port, "/stop", {}),
    ]

    assert [status for status, _ in found] == [422, 413, 409]
    assert found[0][1]["detail"][0]["loc"] == ["body", "nnodes"]
    assert found[2][1]["detail"] == (
        "the agent is ready, and becomes stopping from: running, completed, faulted"
    )
    texts = [
        exchange(port, "GET /start HTTP/1.1\r\nHost: a\r\n\r\n"),
        exchange(port, "GET /status?all=1 HTTP/1.1\r\nHost: a\r\n", "\r\n"),
        exchange(port, "POST /stop HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n", "null"),
        exchange(port, "POST /stop HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{", "}"),
    ]  # fmt: skip
    assert [int(text.split()[1]) for text in texts] == [405, 200, 409, 409]
    assert '"allowed: POST"' in texts[0]
    assert ready.status()["status"] == "ready"
    assert list(ready.status()["transitions"]) == ["INIT", "READY"]
    assert ready.end() == 0


def begin_guarded(node: Node, *options: str) -> None:
    """Start the agent, which may not answer the test, and wait until it listens."""
    words = ("--local-addr", "127.0.0.1", "--operator-port", str(node.port), *options)
    node.run.start(node.name, *words)
    wait_until(lambda: node.port in listening_ports(node.run.agents[node.name].pid))


@pytest.mark.parametrize(("network", "status"), [("10.0.0.0/8", 403), ("127.0.0.0/31", 200)])
def test_only_callers_of_the_networks_are_answered(node: Node, network: str, status: int) -> None:
    begin_guarded(node, "--operator-from", network)

    assert call(node.port, "/status")[0] == status
    assert call(node.port, "/shutdown", {})[0] == status
    node.run.agents[node.name].send_signal(signal.SIGTERM)
    assert node.run.wait() == 0


def test_commands_bring_the_token_where_there_is_one(node: Node, tmp_path: Path) -> None:
    file = write_token(tmp_path / "token")
    begin_guarded(node, "--operator-token-file", str(file))

    assert call(node.port, "/shutdown", {})[0] == 401
    assert call(node.port, "/shutdown", {}, Authorization="Bearer no")[0] == 401
    token = file.read_text().strip()
    assert call(node.port, "/shutdown", {}, Authorization=f"Bearer {token}")[0] == 200
    assert node.run.wait() == 0


def test_a_port_that_is_taken_is_said(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        node.run.start("n0", "--local-addr", "127.0.0.1", "--operator-port", port)

        assert node.run.wait() == 1
    assert f"cannot serve --operator-port {port}" in node.run.text()

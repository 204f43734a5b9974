"""A stand-in for HyperPod's operator: it drives real agents over HTTP, as the real one does."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_ports
from tests.resilience.agent.runs import LIMIT_S, Run
from tests.waiting import wait_until

Answer = tuple[int, dict[str, Any]]


def call(
    port: int, path: str, body: object = None, *, host: str = "127.0.0.1", **headers: str
) -> Answer:
    """Return status and content of the answer to one request."""
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if path == "/status" else "POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


@dataclass(kw_only=True)
class Node:
    """One agent under the operator."""

    run: Run
    name: str = "n0"
    host: str = "127.0.0.1"
    port: int = field(default_factory=lambda: free_ports(1)[0])
    seen: list[str] = field(default_factory=list)
    """The states in the order in which the operator has seen them."""

    def begin(
        self, *options: str, variables: Mapping[str, str | None] | None = None, **more: Any
    ) -> None:
        """Start the agent, and wait until it is ready."""
        words = ("--local-addr", self.host, "--operator-port", str(self.port), *options)
        self.run.start(self.name, *words, variables=variables, **more)
        self.wait("ready")

    def status(self) -> dict[str, Any]:
        """Ask for the state, {} while the port is closed."""
        with suppress(ConnectionError):
            status, content = call(self.port, "/status")
            assert status == 200, content
            if self.seen[-1:] != [content["status"]]:
                self.seen.append(content["status"])
            return content
        return {}

    def wait(self, *states: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Return the answer that first shows one of the states."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            found.clear()
            found.update(self.status())
            return found.get("status") in states

        wait_until(is_there, lambda: f"{states}: {found}\n{self.run.show()}", limit_s=limit_s)
        return found

    def step(self) -> int:
        """Return the newest step that /status shows, -1 for none."""
        progress = self.status().get("progress") or {}
        return max((each["progressCount"] for each in progress.values()), default=-1)

    def wait_for_step(self, step: int) -> None:
        """Return when the run has come to a step."""
        wait_until(lambda: self.step() >= step, self.run.show, limit_s=LIMIT_S)

    def command(self, path: str, body: object = None) -> float:
        """Send a command that is taken; returns when."""
        at_s = time.monotonic()
        status, content = call(self.port, path, body if body is not None else {})
        assert status == 200, content
        return at_s

    def end(self) -> int:
        """Shut the agent down; returns its exit status."""
        self.command("/shutdown")
        return self.run.wait(self.name)

    def workers(self) -> list[int]:
        """Return the processes of the run's agent's children: the zygote's among them."""
        (agent,) = children(self.run.agents[self.name].pid)
        return children(agent)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


(_PORT,) = free_ports(1)
"""Where the agents of this process's tests find each other: another process has its own."""


def start_body(rank: int = 0, hosts: Sequence[str] = ("127.0.0.1",), **more: Any) -> dict[str, Any]:
    """Return the body of /start for a node of some, each of which has a host of its own."""
    return {
        "rank": rank,
        "nnodes": len(hosts),
        "faultCount": 0,
        "master_addr": hosts[0],
        "master_port": _PORT,
        "ipVersion": "v0",
        "rankIps": [{"rank": each, "ip": host} for each, host in enumerate(hosts)],
        "spare": False,
        "progress": {},
        **more,
    }


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)

"""Plays a script to an agent, and returns what a caller sees, without times and texts."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from tests.ports import free_ports
from tests.processes import kill_family, processes_with
from tests.resilience.agent.operator import driver
from tests.resilience.agent.operator.driver import start_body
from tests.resilience.agent.runs import Run
from tests.scenarios.operators.agents import RANKS, Begin, Script
from tests.waiting import wait_until
from tests.warm import Process

LIMIT_S = 40.0
END_S = 15.0
EXACT = ("status", "reason", "restartMode", "assigned_rank", "spare", "ipversion", "priority")
"""Fields of /status that are compared as they are; of the others it is the shape."""
Transcript = dict[str, dict[str, str]]
"""What was seen, by step and name."""
_LOCK = threading.Lock()
_CODE = re.compile(r"(?:code|status|by) (-?\d+|SIG[A-Z]+)")


def shape(value: Any) -> Any:
    """Return of what types a value of JSON is made."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    names = {bool: "flag", int: "number", float: "number", str: "text", type(None): "null"}
    return names[type(value)]


def tell_shape(value: Any) -> str:
    return json.dumps(shape(value)).replace('"', "")


def tell_status(content: dict[str, Any]) -> dict[str, str]:
    """Return the comparable fields of an answer to /status."""
    found = {
        name: str(value) if name in EXACT and value is not None else tell_shape(value)
        for name, value in content.items()
    }
    dates = content["transitions"]
    found["transitions"] = " ".join(sorted(dates, key=dates.__getitem__))
    if code := _CODE.search(content.get("message") or ""):
        found["message"] = f"text with {code[1]}"
    return found


class Node:
    """An agent of a script, and what has become of its workers."""

    def __init__(self, folder: Path, script: Script, number: int, begin: Begin) -> None:
        self.folder, self.script, self.number = folder, script, number
        # Neither ports nor the process that forks others can be had by two threads at once.
        with _LOCK:
            self.agent = driver.Node(run=Run(folder=folder, port=0), name=f"n{number}")
            self.process: Process = begin(folder, script, number, self.agent.port)
        self.agent.run.agents[self.agent.name] = self.process
        self.port, self.status, self.show = self.agent.port, self.agent.status, self.agent.run.show
        self.num_read = self.num_up = 0

    def post(self, path: str, data: str) -> str:
        """Return what is answered to a request."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return f"{answer.status} {tell_answer(answer.read())}"

    def notes(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.folder / "notes.jsonl").read_text().splitlines()
            return [each for each in map(json.loads, lines) if each["node"] == str(self.number)]
        return []

    def signals(self) -> list[str]:
        """Return the signals that workers got since they were told the last time."""
        return sorted(each["signal"] for each in self.notes()[self.num_read :] if "signal" in each)

    def tell_workers(self) -> dict[str, str]:
        """Return what has become of the workers."""
        found = " ".join(self.signals()) or "none"
        self.num_read = len(self.notes())
        # The program that stands for a script's workers writes no notes.
        told = {} if "steps_of_ours" in self.script else {"signals": found}
        return {**told, "left": str(len(self.living()))}

    def living(self) -> set[int]:
        """Return the workers that live."""
        ups = {each["up"] for each in self.notes() if "up" in each}
        return ups & {*processes_with(f"OUT={self.folder}", f"NODE={self.number}")}

    def wait_for_workers(self) -> dict[str, str]:
        """Return what each of the workers of a start was told, once all are there."""

        def ups() -> list[dict[str, Any]]:
            return [each for each in self.notes() if "up" in each][self.num_up :]

        wait_until(lambda: len(ups()) >= RANKS, self.show, limit_s=LIMIT_S)
        found = sorted(ups(), key=lambda each: int(each["local_rank"]))
        self.num_up += RANKS
        names = [name for name in found[0] if name.isupper()]
        return {name: " ".join(str(each[name]) for each in found) for name in names}

    def end(self) -> None:
        kill_family(self.process.pid)
        self.process.wait(LIMIT_S)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


class Play:
    """One script with its agents."""

    def __init__(self, folder: Path, script: Script, begin: Begin) -> None:
        self.folder, self.script, self.begin = folder, script, begin
        self.nodes: list[Node] = []
        with _LOCK:
            (self.rendezvous,) = free_ports(1)
        self.open = ExitStack()

    def play(self) -> Transcript:
        """Take one step after the other."""
        found: Transcript = {}
        times = Counter[str]()
        with self.open:
            self.open.callback(lambda: [each.end() for each in self.nodes])
            for number in range(self.script.get("nodes", 1)):
                self.nodes.append(Node(self.folder, self.script, number, self.begin))
            for node in self.nodes:
                node.agent.wait("ready", limit_s=LIMIT_S)
            for step in self.script["steps"]:
                word, *rest = step if isinstance(step, list) else [step]
                name = f"{word} {json.dumps(rest[:1])[1:-1]}".replace('"', "")
                name = name.replace("\\r\\n", " ").removesuffix(" {}").strip()
                times[name] += 1
                name += f" ({times[name]})" if times[name] > 1 else ""
                node = self.nodes[rest[2] if len(rest) > 2 else 0]
                found[name] = self.take(word, rest, node)
        return found

    def take(self, word: str, rest: list[Any], node: Node) -> dict[str, str]:
        """Take one step, and return what was seen."""
        if word == "workers":
            return node.wait_for_workers()
        if word == "steps":
            wait_until(lambda: node.status().get("progress"), node.show, limit_s=LIMIT_S)
        elif word == "terminate":
            node.process.terminate()
        elif word == "signals":
            wait_until(lambda: len(node.signals()) >= RANKS, node.show, limit_s=LIMIT_S)
            return node.tell_workers()
        if word in ("terminate", "exit"):
            with suppress(subprocess.TimeoutExpired):
                node.process.wait(END_S)
            status = node.process.poll()
            end = f"none within {END_S:g} s" if status is None else str(status)
            return {"exit": end, **node.tell_workers()}
        if word == "wire":
            return exchange(node.port, rest[0])
        if word == "silent":
            return self.flood(node, rest[0])
        found = {}
        if word in ("start", "update", "stop", "shutdown"):
            found["answer"] = node.post(f"/{word}", self.body(word, node, *rest[:1]))
            if word == "shutdown" and len(rest) < 2:
                return found
        if len(rest) > 1:
            node.agent.wait(*rest[1].split("|"), limit_s=LIMIT_S)
        found |= tell_status(node.status())
        return found | (node.tell_workers() if rest[1:2] == ["ready"] else {})

    def body(self, word: str, node: Node, changes: Any = None) -> str:
        """Return a command's body: the right one with changes, or what is no table as it is."""
        if word not in ("start", "update") or not isinstance(changes, dict):
            return changes if isinstance(changes, str) else json.dumps(changes or {})
        number = changes.get("nnodes")
        hosts = [f"127.0.0.{each + 1}" for each in range(number if number in (1, 2) else 1)]
        body = {**start_body(node.number, hosts, master_port=self.rendezvous), **changes}
        return json.dumps({key: value for key, value in body.items() if value != "left out"})

    def flood(self, node: Node, number: int) -> dict[str, str]:
        """Hold half a request and some that say nothing; is another one answered meanwhile?"""
        half, *_ = (
            self.open.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=8))
            for _ in range(number)
        )
        half.sendall(b"POST /start HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        found = {"another": str(node.status().get("status")), "half": "is closed"}
        try:
            if half.recv(100):
                found["half"] = "is answered"
        except TimeoutError:
            found["half"] = "is kept for 8 s"
        return found


def tell_answer(content: bytes) -> str:
    if not content:
        return "nothing"
    with suppress(ValueError):
        told = json.loads(content)
        if isinstance(detail := told.get("detail"), list):
            # A number is a place in the text.
            places = {re.sub(r"^\d+$", "body", str([*each["loc"], "body"][1])) for each in detail}
            return " ".join(["for", *sorted(places)])
        # The fields of a status stand beside it, and those of a schema are many.
        names = ("status", "openapi")
        return next((name for name in names if name in told), tell_shape(told))
    return "no JSON"


def exchange(port: int, text: str) -> dict[str, str]:
    """Send a request as it is, and return its answer's head and whether the next one has one."""
    with socket.create_connection(("127.0.0.1", port), timeout=8) as connection:
        connection.sendall(text.encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        content = answer.read()
        names = sorted(each.lower() for each in answer.headers if each.lower() != "date")
        found = {"answer": f"{answer.status} {tell_answer(content)}", "head": " ".join(names)}
        found["next"] = "is not answered"
        with suppress(ConnectionError):
            connection.sendall(b"GET /status HTTP/1.1\r\nHost: a\r\n\r\n")
            if connection.recv(100):
                found["next"] = "is answered"
        return found

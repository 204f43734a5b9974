"""Real runs of real agents, and what they leave behind."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.events import Event, read_events
from tests.ports import free_ports
from tests.processes import command_of
from tests.warm import Process
from tests.warm import start as start_process

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")
PLAIN_PROGRAM = Path(__file__).with_name("plain_program.py")
LIMIT_S = 240
"""A run that takes longer hangs."""
MARK = "AGENT_TEST_RUN"


def _shared_memory() -> set[str]:
    return {each.name for each in Path("/dev/shm").iterdir()}


@dataclass(kw_only=True)
class Run:
    """The agents of one run, on this machine."""

    folder: Path
    port: int
    """Of the agents' endpoint; 0 for none."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    agents: dict[str, Process] = field(default_factory=dict)
    shared_memory: set[str] = field(default_factory=_shared_memory)

    def start(
        self,
        node: str,
        *options: str,
        program: Sequence[str] = (str(PROGRAM),),
        warm: str = "program",
        variables: Mapping[str, str | None] | None = None,
        is_real: bool = False,
        preload: Sequence[str] = ("torch", "torch._dynamo"),
        interpreter: Sequence[str] = ("python",),
        within: Sequence[str] = (),
    ) -> Process:
        """Start the agent of a node; `within` are the words before its own, see `Network.words`."""
        for name in ("out", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
        environment = {
            **{key: value for key, value in os.environ.items() if key != "RANK"},
            MARK: self.mark,
            "OUT": str(self.folder / "out"),
            "TMPDIR": str(self.folder / "tmp"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **(variables or {}),
        }
        # Of no use, and so refused, where nothing recovers.
        brief = ("--stop-deadline-s", "3", "--transfer-buffer-mib", "1")
        command = [
            *within,
            *("resilience.agent", "--local-addr", "127.0.0.1"),
            *(("--rdzv-endpoint", f"127.0.0.1:{self.port}") if self.port else ()),
            *("--node-name", node, "--run-dir", str(self.folder / "run"), "--warm", warm),
            *(f"--preload={each}" for each in preload),
            *(() if "--no-recovery" in options else brief),
            *options,
            *("--", *interpreter, *program),
        ]
        with (self.folder / f"{node}.txt").open("ab") as output:
            agent = start_process(
                command,
                folder=self.folder,
                environment={key: value for key, value in environment.items() if value is not None},
                output=output,
                is_real=is_real,
            )
        self.agents[node] = agent
        return agent

    def wait(self, node: str = "n0") -> int:
        """Return the exit status of a node's agent."""
        try:
            return self.agents[node].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{node} hangs\n{self.show()}") from None

    def text(self, node: str = "n0") -> str:
        """Return what a node's agent and workers have printed."""
        return (self.folder / f"{node}.txt").read_text()

    def show(self) -> str:
        """Return all that is known of the run, for a failure's message."""
        parts = [f"--- {node}\n{self.text(node)}" for node in self.agents]
        events = [
            f"{each.node} {each.rank} {each.event} {dict(each.fields)}" for each in self.events()
        ]
        return "\n".join([*parts, "--- events", *events])

    def events(self) -> list[Event]:
        """Return the events of the run."""
        with suppress(FileNotFoundError):
            return read_events(self.folder / "run" / "events.jsonl")
        return []

    def digests(self) -> dict[int, str]:
        """Return the digest that each rank ended with."""
        files = (self.folder / "out").glob("digest-*")
        return {int(each.name.partition("-")[2]): each.read_text() for each in files}

    def happened(self) -> list[int]:
        """Return the numbers of the faults that came about."""
        files = (self.folder / "out").glob("fault-*")
        return sorted(int(each.name.partition("-")[2]) for each in files)

    def resumed(self) -> list[list[Any]]:
        """Return [generation, rank, role, step] of each resumption."""
        return _read_lines(self.folder / "out" / "resumed.jsonl")

    def processes(self) -> list[int]:
        """Return the processes of the run that live, whoever started them."""
        mark = f"{MARK}={self.mark}".encode()
        found = []
        for each in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in each.read_bytes():
                    found.append(int(each.parent.name))
        return found

    def zygote(self, node: str = "n0") -> int:
        """Return the process that forks a node's workers, before another one takes its place."""
        return self.children(node)[0]

    def children(self, node: str) -> list[int]:
        """Return the zygote and the workers of a node, in the order of their start."""
        parent = self.agents[node].pid
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(word) for word in text.split()]

    def wait_for_note(self) -> int:
        """Return the process of a worker once it has come to where it waits for the test."""
        note = os.open(self.note, os.O_RDWR)
        agents = [os.pidfd_open(agent.pid) for agent in self.agents.values()]
        ready = select.select([note, *agents], [], [], LIMIT_S)[0]
        said = os.read(note, 64) if note in ready else b""
        for file in (note, *agents):
            os.close(file)
        assert said, f"no worker came to its place\n{self.show()}"
        return int(said.splitlines()[0])

    def wait_for(self, is_it: Callable[[Event], bool]) -> Event:
        """Return the first event of which it is so."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            if found := [event for event in self.events() if is_it(event)]:
                return found[0]
            # A file cannot be waited for.
            select.select([], [], [], 0.05)
        raise AssertionError(f"it did not happen\n{self.show()}")

    @property
    def note(self) -> Path:
        """Return the pipe through which a worker says that it has come to its place."""
        path = self.folder / "note"
        if not path.exists():
            os.mkfifo(path)
        return path

    def kill(self, node: str) -> None:
        """Kill an agent, and with it the node's workers."""
        self.agents[node].kill()
        self.agents[node].wait()

    def assert_same(self, digest: str) -> None:
        """Fail where a rank ended otherwise than in a run without faults, or something is left."""
        assert set(self.digests().values()) == {digest}, self.show()
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Fail for a process, a file in shared memory or a temporary file that is left."""
        deadline_s = time.monotonic() + 10
        while (living := self.processes()) and time.monotonic() < deadline_s:
            _wait_for_end(living, deadline_s)
        commands = [command for each in self.processes() if (command := command_of(each))]
        assert commands == [], f"processes are left\n{self.show()}"
        # Others' numbers may have this one in them.
        agents = "|".join(str(each.pid) for each in self.agents.values())
        ours = re.compile(rf"resilience|(?<!\d)({agents})(?!\d)")
        left = [name for name in _shared_memory() - self.shared_memory if ours.search(name)]
        assert left == []
        files = {each.name for each in (self.folder / "tmp").iterdir()}
        assert {each for each in files if not each.startswith("torchinductor_")} == set()

    def end(self) -> None:
        """End what a failed test has left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait(LIMIT_S)


def _wait_for_end(pids: Sequence[int], deadline_s: float) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            file = os.pidfd_open(pid)
            select.select([file], [], [], max(0.0, deadline_s - time.monotonic()))
            os.close(file)


def _read_lines(path: Path) -> list[Any]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def fault(kind: str, at: str, rank: int, step: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a fault as the program reads it."""
    where = {} if step is None else {"step": step}
    return {"kind": kind, "at": at, "rank": rank, **where, **more}


def plan(*faults: Mapping[str, Any], **variables: Any) -> dict[str, str]:
    """Return the program's variables."""
    return {"FAULTS": json.dumps(faults), **{key: str(value) for key, value in variables.items()}}


def run_undisturbed(folder: Path, num_ranks: int, steps: int) -> None:
    """Run the program without faults, and write the digest that all ranks end with."""
    run = Run(folder=folder, port=free_ports(1)[0])
    options = ("--nproc-per-node", str(num_ranks), "--spares", "0")
    run.start("n0", *options, variables=plan(STEPS=steps))
    assert run.wait() == 0, run.show()
    digests = run.digests()
    assert len(digests) == num_ranks
    (digest,) = set(digests.values())
    (folder / "digest").write_text(digest)


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on, the last opened first."""
    return [port for _, port in listening(pid)]


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports that a process listens on, the last opened first.

    Nothing for a process that has ended since.
    """
    lines: list[list[str]] = []
    inodes: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        files = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda each: -int(each.name))
        for each in files:
            with suppress(FileNotFoundError):
                inodes.append(str(each.readlink()))
        for name in ("tcp", "tcp6"):
            text = Path(f"/proc/{pid}/net/{name}").read_text()
            lines += [line.split() for line in text.splitlines()[1:]]
    found = {f"socket:[{line[9]}]": _read_address(line[1]) for line in lines if line[3] == "0A"}
    return [found[inode] for inode in inodes if inode in found]


def _read_address(text: str) -> tuple[str, int]:
    """Read an address as /proc has it: words of 32 bits in the machine's order."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)

"""Agents with real workers on this machine that stand still, die, are cut off and come back.

What `simulation` is to the decisions, this is to processes, sockets and signals.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.namespaces import Network
from resilience.comm.messages import GAVE_UP_STATUS
from resilience.events import Event, EventReader
from tests.resilience.agent.runs import Run
from tests.scenarios.membership.agents.history import History, read_note

PROGRAM = Path(__file__).with_name("counting_program.py")
STEP_S = 0.01
LIMIT_S = 60.0
"""A run that does not go on within this stands still."""
_ENDLESS = 1_000_000


def pause(seconds: float) -> None:
    """Let the world go on alone for a while."""
    select.select([], [], [], max(0.0, seconds))


@dataclass(kw_only=True)
class RealWorld:
    """Agents n0, n1, ... of one run, more of which wait than work."""

    run: Run
    num_nodes: int
    num_standby: int = 0
    num_shards: int = 1
    num_spares: int = 0
    lease_s: float = 0.3
    patience_s: float = 600.0
    num_endpoints: int | None = None
    """How many of the agents' addresses they are told; by default all."""
    ports: tuple[int, ...] = ()
    """Of this machine, one for each agent; unused where agents have hosts of their own."""
    network: Network | None = None
    history: History = field(init=False)
    starts: dict[str, float] = field(default_factory=dict)
    """When each agent that lives was started."""
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(
            num_ranks=self.num_nodes, num_shards=self.num_shards, is_sharded=self.num_shards > 1
        )
        (self.run.folder / "run").mkdir()
        (self.run.folder / "out").mkdir()
        self._reader = EventReader(self.run.folder / "run" / "events.jsonl")
        self._notes_bytes = 0

    @property
    def is_impatient(self) -> bool:
        """Return whether agents that wait for others may have given up before these are back."""
        return self.patience_s < LIMIT_S

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(self.num_nodes + self.num_standby)]

    # ---- agents

    def start(self, *names: str) -> None:
        """Start agents, those that live already left alone."""
        for name in names:
            if name in self.starts:
                continue
            options = {
                "nnodes": self.num_nodes,
                "standby-nodes": self.num_standby,
                "spares": self.num_spares,
                "lease-s": self.lease_s,
                "partition-patience-s": self.patience_s,
                "join-deadline-s": LIMIT_S,
                "hang-deadline-s": LIMIT_S,
                "restarts-max": _ENDLESS,
                "restarts-without-progress-max": _ENDLESS,
                **({"shards": self.num_shards} if self.num_shards > 1 else {}),
            }
            self.run.start(
                name,
                *(f"--{key}={value}" for key, value in options.items()),
                *self._place(name),
                program=(str(PROGRAM),),
                variables={
                    "STEP_S": str(STEP_S),
                    "GLOO_SOCKET_IFNAME": "lo" if self.network is None else "eth0",
                },
                within=() if self.network is None else self.network.words(self.names.index(name)),
            )
            self.starts[name] = time.time()

    def _place(self, name: str) -> list[str]:
        """Return by what an agent finds the others."""
        if self.network is not None:
            return self.network.agent_options(self.names.index(name), self.run.folder)
        addresses = [f"127.0.0.1:{port}" for port in self.ports[: self.num_endpoints]]
        return [f"--rdzv-endpoint={','.join(addresses)}"]

    def kill(self, *names: str) -> None:
        """Kill agents; their workers die with them."""
        for name in names:
            if self.starts.pop(name, None) is not None:
                children = self._children(name)
                self.run.agents[name].kill()
                # One that was frozen as it began sees only now that its agent is gone.
                self._signal(signal.SIGCONT, children)
        for name in names:
            self.run.agents[name].wait(LIMIT_S)

    def stand_still(self, *names: str) -> None:
        """Stop agents; their workers go on."""
        self._signal(signal.SIGSTOP, [self.run.agents[name].pid for name in self._alive(names)])

    def go_on(self, *names: str) -> None:
        """Let agents go on, and workers first: no agent is to see its own standing still."""
        for name in self._alive(names):
            agent = self.run.agents[name].pid
            self._signal(signal.SIGCONT, [*self._children(name), agent])

    def freeze(self, *names: str) -> None:
        """Stop agents with all their processes, as a machine stands still that is moved."""
        for name in self._alive(names):
            self._signal(signal.SIGSTOP, [self.run.agents[name].pid])
            self._signal(signal.SIGSTOP, self._children(name))

    def kill_worker(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the oldest worker of an agent, where it has one, or send it another signal."""
        for agent in self._alive([name]):
            self._signal(number, self._children(agent)[1:2])

    def cut(self, *names: str) -> None:
        """Let nothing pass between these agents and the others."""
        assert self.network
        hosts = range(len(self.names))
        side = {self.names.index(name) for name in names}
        self.network.split(side, set(hosts) - side)

    def heal(self) -> None:
        """Let all pass again."""
        if self.network is not None:
            self.network.heal()

    def _alive(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self.starts]

    def _children(self, name: str) -> list[int]:
        """Return the zygote and the workers, the oldest first; none of an agent that has ended."""
        with suppress(OSError):
            return self.run.children(name)
        return []

    @staticmethod
    def _signal(number: signal.Signals, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # ---- what happens

    def look(self) -> None:
        """Read what was noted since."""
        path = self.run.folder / "out" / "ranks.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._notes_bytes)
                *lines, _ = file.read().split(b"\n")
            self._notes_bytes += sum(len(line) + 1 for line in lines)
            self.history.notes += [read_note(line.decode()) for line in lines]
        self._events += self._reader.read_new()

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        self.look()
        while not is_so():
            ended = self._ended()
            if self.is_impatient:
                ended = self._start_again(ended)
            if ended or time.monotonic() > deadline_s:
                raise AssertionError(f"not so: {what}; ended: {ended}\n{self.show()}")
            pause(0.02)
            self.look()

    def _ended(self) -> dict[str, int]:
        """Return the agents that have ended by themselves, and how."""
        statuses = {name: self.run.agents[name].poll() for name in self.starts}
        return {name: status for name, status in statuses.items() if status is not None}

    def _start_again(self, ended: Mapping[str, int]) -> dict[str, int]:
        """Start those again that have waited for others as long as they may; return the rest."""
        for name, status in ended.items():
            last = self.run.text(name).splitlines()[-1:]
            if status == GAVE_UP_STATUS and any(_HAS_WAITED.search(line) for line in last):
                del self.starts[name]
                self.start(name)
        return self._ended()

    def wait_for_progress(self) -> None:
        """Return when all agents belong to the run, and it steps on."""
        self.look()
        begun_s = time.monotonic()
        self.wait_until(lambda: self.absent() == set(), "all agents belong to the run")
        self.wait_until(lambda: self._num_passed(begun_s) >= 3, "the run steps on")

    def absent(self) -> set[str]:
        """Return the agents that the coordinator does not count as its own."""
        opened = [each for each in self._events if each.event == "generation_opened"]
        if not opened:
            return set(self.starts)
        there = set()
        for each in self._events:
            if each.node != opened[-1].node:
                continue
            name = str(each.fields.get("node"))
            if each.event == "node_joined" and each.time >= self.starts.get(name, 0.0):
                there.add(name)
            elif each.event == "node_lost":
                there.discard(name)
        return set(self.starts) - there

    def num_joined(self, name: str) -> int:
        """Return how often an agent has joined the run."""
        joined = [each for each in self._events if each.event == "node_joined"]
        return sum(each.fields["node"] == name for each in joined)

    def _num_passed(self, since_s: float) -> int:
        """Return how many steps the newest generation has committed since."""
        newest = max((each.generation for each in self.history.notes), default=-1)
        return len(
            {
                each.fields["step"]
                for each in self.history.notes[-_LOOKED_AT:]
                if each.what == "pass" and each.generation == newest and each.at_s >= since_s
            }
        )

    # ---- the end

    def finish(self, later: Sequence[str] = ()) -> None:
        """Let the run end, and hold it against its promises; some agents go on only after it."""
        self.wait_for_progress()
        living = {pid for name in self.starts for pid in self._children(name)}
        (self.run.folder / "out" / "finish").touch()
        statuses = {name: self.run.wait(name) for name in self.starts if name not in later}
        self.go_on(*later)
        statuses |= {name: self.run.wait(name) for name in later}
        self.look()
        assert statuses == dict.fromkeys(self.starts, 0), self.show()
        problems = [
            *self.history.problems(living, loses=self.is_impatient),
            *self._repeated_numbers(),
        ]
        assert problems == [], "\n".join([*problems, self.show()])
        if not self.is_impatient:
            # One that gives up shows the first failure.
            assert "Traceback" not in "".join(map(self.run.text, self.run.agents)), self.show()
        self.run.assert_nothing_left()

    def _repeated_numbers(self) -> list[str]:
        opened = [
            int(each.fields["number"]) for each in self._events if each.event == "generation_opened"
        ]
        return [f"generation {each} opens twice" for each in opened if opened.count(each) > 1]

    def show(self) -> str:
        """Return what is known of the run, for a failure's message."""
        ranks = [each for each in self.history.notes if each.what != "pass"]
        lines = [str(each) for each in ranks[-_SHOWN:]]
        absent = f"--- absent {sorted(self.absent())}"
        return "\n".join([self.run.show()[-_SHOWN_CHARS:], "--- notes", *lines, absent])


_HAS_WAITED = re.compile(r"exit status 75: .*(did not within|not begun anew within)")
_LOOKED_AT = 400
_SHOWN = 60
_SHOWN_CHARS = 20_000

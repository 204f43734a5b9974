"""Cost of one fault to the coordinator's agent, by the size of the run.

    python -m benchmarks.scale [--nodes 8,16,128,1024] [--ranks-per-node 8] [--plot FILE.svg]

The real decisions of the coordinator, with messages encoded and decoded as on the wire; nodes are
lists of messages, and the sockets are left out. Prints the processor's seconds for the founding of
a run and for one fault: a rank fails, all ranks report what they hold, and the next generation
opens. Beside it the bytes that leave, and those of one node's Open.

With `--plot` openings of gloo's groups are measured at 16 to 64 ranks, which takes minutes, and
fitted. A recovery is simulated from that: a node is lost, and counts as silent after 3 s. The
coordinator decides, and the groups of the next generation open. NCCL's groups are left out.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.scale_groups import draw, fit_gloo
from resilience.agent.connections.transport import Arrival, Came, Heard
from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.events import Ended
from resilience.agent.coordination.membership import Options, State
from resilience.agent.coordination.node import MembershipNode
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.view import MembershipView, find_endpoint_order
from resilience.comm.messages import (
    Agree,
    Failed,
    Hello,
    Message,
    Open,
    Propose,
    Stopped,
    StoreReply,
    decode,
    encode,
)
from resilience.state.layout import Layout
from resilience.state.report import Phase, fresh_report

LEASE_S = 10.0
SILENT_S = 3.0
"""lease_s of a recipe."""


@dataclass
class Wire:
    """Connections of the coordinator's agent: lines in, lines out."""

    address: str = "n0:1"
    lines: list[tuple[int, bytes | None]] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    """Each message once that many are sent in a row."""
    num_bytes: Counter[str] = field(default_factory=Counter)
    open_bytes: int = 0

    def fileno(self) -> int:
        """Return no descriptor."""
        return -1

    def connect(self, address: str) -> int:
        """Begin no connection."""
        return -1

    def hang_up(self, peer: int) -> None:
        """End nothing."""

    def close(self) -> None:
        """End nothing."""

    def tick(self, now_s: float) -> float:
        """Return that nothing is due."""
        return float("inf")

    def send(self, peer: int, message: Message) -> None:
        """Count what would be sent."""
        kind, size = type(message).__name__, len(encode(message))
        self.num_bytes[kind] += size
        if self.sent[-1:] != [message]:
            self.sent.append(message)
        if isinstance(message, Open):
            self.open_bytes = size

    def receive(self) -> list[Arrival]:
        """Return what was said, decoded."""
        lines, self.lines = self.lines, []
        return [
            Came(peer=peer) if line is None else Heard(peer=peer, message=decode(line))
            for peer, line in lines
        ]


@dataclass
class Run:
    """A run of nodes whose agents say what agents say."""

    num_nodes: int
    num_local_ranks: int
    num_at_once: int = 64
    """Messages that the agent finds each time that it looks."""
    wire: Wire = field(default_factory=Wire)
    standing: dict[str, Standing] = field(default_factory=dict)
    opened: Open | None = None
    proposal: Propose | None = None
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.names = [f"node-{number:04d}" for number in range(self.num_nodes)]
        self.options = Options(
            num_nodes=self.num_nodes, num_local_ranks=self.num_local_ranks, lease_s=LEASE_S
        )
        address = self.wire.address
        order = find_endpoint_order(address, (address,))
        hello = Hello(run="run", node=self.names[0], address=address, start="s0", order=order)
        view = MembershipView(hello=hello, endpoints=(address,), lease_s=LEASE_S)
        self.member = MembershipNode(
            self,
            view,
            transport=self.wire,
            records=self,
            note=lambda note, generation: None,
            clock=lambda: self.now_s,
            doubt=lambda doubted: None,
        )

    # ---- the coordinator's agent

    def obey(self, message: Message) -> None:
        """Agree to what is proposed, and note what opens."""
        if isinstance(message, Propose):
            self.proposal = message
            self.member.tell(Agree(generation=message.generation, ballot=message.ballot))
        elif isinstance(message, Open):
            self.opened = message

    def reply(self, reply: StoreReply) -> None:
        """Take no reply of a store."""

    def drain(self, order: Message) -> str:
        """Leave nothing."""
        return ""

    def join(self) -> None:
        """Join as the first node."""
        self.member.tell(self.make_join(0))

    def make_join(self, number: int) -> Any:
        """Return what a node says as it joins."""
        name = self.names[number]
        join = Standing().join(
            node=name, address=f"n{number}:1", start=f"s{number}", sees_folder=False
        )
        assert self.member.state or number == 0
        ballot = self.member._view.hello.ballot  # noqa: SLF001
        return replace(join, promised=ballot)

    def make_state(self, lost: str, dead: frozenset[str], known: frozenset[str]) -> State:
        """Return what the coordinator begins with."""
        return take_over(
            self.options, Standing(), lost=lost, dead=dead, known=known, now_s=self.now_s
        )

    # ---- the folder, which no node sees

    def look(self, start: str) -> None:
        """See no folder."""

    def found(self, agents: tuple[str, ...]) -> None:
        """Ask no folder."""

    def renew(self, state: State, *, is_over: bool) -> None:
        """Write no record."""

    def read_record(self, after: Ended) -> None:
        """Read no record."""

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for no record."""

    # ---- what happens

    def say(self, *said: tuple[int, Message | None]) -> None:
        """Have the agent read what nodes say, some at a time as its loop does."""
        lines = [(peer, None if each is None else encode(each)) for peer, each in said]
        begun_s = time.process_time()
        for at in range(0, len(lines), self.num_at_once):
            self.wire.lines = lines[at : at + self.num_at_once]
            self.now_s += 0.001
            self.member.tick()
        self.spent_s += time.process_time() - begun_s

    spent_s: float = 0.0

    def take_spent_s(self) -> float:
        """Return the processor's seconds since the last call."""
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s

    def begin(self) -> None:
        """Found the run."""
        self.member.tick()
        others = range(1, self.num_nodes)
        self.say(*((number, None) for number in others))
        for number in others:
            hello = Hello(run="run", node=self.names[number], address=f"n{number}:1", order=1 << 30)
            self.say((number, hello))
        self.say(*((number, self.make_join(number)) for number in others))
        self.agree()

    def agree(self) -> None:
        """Have all nodes agree."""
        assert self.proposal
        agreed = Agree(generation=self.proposal.generation, ballot=self.proposal.ballot)
        self.say(*((number, agreed) for number in range(1, self.num_nodes)))
        assert self.opened
        assert self.opened.generation == self.proposal.generation

    def fail(self) -> None:
        """Have a rank fail, all report, and all agree."""
        assert self.opened
        layout, generation = self.opened.layout, self.opened.generation
        failed = Failed(
            generation=generation, rank=layout.num_local_ranks, reason="exception", text="x"
        )
        self.say((1, failed))
        stopped: list[tuple[int, Message]] = []
        for rank in range(layout.world_size):
            report = replace(
                fresh_report(layout, rank, generation),
                phase=Phase.COMPUTING,
                step=generation + 5 + rank % 2,
                step_generation=generation,
                member_generation=generation,
                rest={"saved": 0, "place": "ram"},
            )
            message = Stopped(generation=generation, rank=rank, report=report.to_json())
            stopped.append((rank // layout.num_local_ranks, message))
        for node, message in stopped:
            if node == 0:
                begun_s = time.process_time()
                self.member.tell(message)
                self.spent_s += time.process_time() - begun_s
        self.say(*(each for each in stopped if each[0]))
        self.agree()


def measure_fault(num_nodes: int, num_local_ranks: int) -> float:
    """Print a line for one size; returns the processor's seconds for a fault."""
    run = Run(num_nodes, num_local_ranks)
    run.begin()
    founded_s = run.take_spent_s()
    founded = sum(run.wire.num_bytes.values())
    run.wire.num_bytes.clear()
    run.fail()
    fault_s = run.take_spent_s()
    print(
        f"{num_nodes:5d} nodes {num_nodes * num_local_ranks:6d} ranks  "
        f"founding {founded_s:7.2f} s {founded / 1e6:9.1f} MB  "
        f"fault {fault_s:7.2f} s {sum(run.wire.num_bytes.values()) / 1e6:8.1f} MB  "
        f"one Open {run.wire.open_bytes / 1024:7.1f} KiB",
        flush=True,
    )
    return fault_s


def simulate(faults: dict[int, float], num_local_ranks: int, path: Path) -> None:
    """Print the simulated recoveries from a lost node by ranks, and draw them."""
    cost = fit_gloo([16, 24, 32, 48, 64], num_times=3)
    curves: dict[str, list[tuple[int, float]]] = {}
    for ranks, fault_s in faults.items():
        mesh_s, leaders_s = cost.open_s(ranks), cost.open_leaders_s(ranks, num_local_ranks)
        seconds = {
            "recovery, leaders": SILENT_S + fault_s + leaders_s,
            "recovery, mesh": SILENT_S + fault_s + mesh_s,
            "its coordinator": fault_s,
            "its leaders' groups": leaders_s,
        }
        for name, each_s in seconds.items():
            curves.setdefault(name, []).append((ranks, each_s))
        recovery_s, first_s = seconds["recovery, leaders"], curves["recovery, leaders"][0][1]
        print(
            f"{ranks:6d} ranks  a lost node {recovery_s:.2f} s, {recovery_s / first_s:.2f} x the "
            f"first size; of it leaders' groups {leaders_s:.3f} s. A mesh of all ranks instead: "
            f"{mesh_s:.2f} s, {cost.count_bytes(ranks) / 1e6:.1f} MB of addresses a rank"
        )
    path.write_text(draw(curves))


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", default="8,16,128,1024", help="sizes, with commas")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--plot", type=Path, help="simulate recoveries, and draw them")
    arguments = parser.parse_args()
    num_local_ranks = arguments.ranks_per_node
    sizes = map(int, arguments.nodes.split(","))
    faults = {each * num_local_ranks: measure_fault(each, num_local_ranks) for each in sizes}
    if arguments.plot:
        simulate(faults, num_local_ranks, arguments.plot)


if __name__ == "__main__":
    main()

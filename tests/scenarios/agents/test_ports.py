"""Where the processes of a run listen, as docs/recovery.md says, and what others do there."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from resilience.agent.connections.address import listen
from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.connections.transport import Gone, Heard
from resilience.comm.messages import (
    Beat,
    Break,
    End,
    Failed,
    Finished,
    Hello,
    Join,
    Message,
    ReplaceRank,
    Stopped,
    StopRun,
    StoreRequest,
)  # fmt: skip
from tests.processes import descendants
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, listening, plan
from tests.resilience.transports import LIMIT_S
from tests.tokens import TOKEN, write_token

ADDRESS = "127.0.0.1:9"


def read_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def say(port: int, *messages: Message, ends_with: type[Message] = Hello) -> list[Message]:
    """Say something to an agent as a member, and return its answers up to one of a kind."""
    with closing(TcpTransport(listen("127.0.0.1", 0), token=TOKEN, lease_s=LIMIT_S)) as member:
        peer = member.connect(f"127.0.0.1:{port}")
        for each in messages:
            member.send(peer, each)
        heard: list[Message] = []
        is_gone = False
        while not (is_gone or any(isinstance(each, ends_with) for each in heard)):
            rest_s = member.tick(time.monotonic()) - time.monotonic()
            select.select([member], [], [], max(0.0, min(rest_s, LIMIT_S)))
            arrived = member.receive()
            heard += [each.message for each in arrived if isinstance(each, Heard)]
            is_gone = any(isinstance(each, Gone) for each in arrived)
    return heard


def claim(port: int) -> None:
    """Say of other names, ranks and generations what is not so, with the token of the run."""
    (agent,) = say(port, Hello(run="", node="n7", address=ADDRESS, order=0))
    assert isinstance(agent, Hello)

    def hello(node: str, address: str = ADDRESS) -> Hello:
        return Hello(run=agent.run, node=node, address=address, order=0)

    def join(node: str, program: str, generation: int = -1) -> Sequence[Message]:
        return hello(node), Join(
            node=node,
            address=ADDRESS,
            start="7",
            program=program,
            generation=generation,
            opened=generation,
        )

    false = [
        *[Finished(generation=0, rank=rank, status=0, is_done=True) for rank in (0, 1)],
        Failed(generation=0, rank=0, reason="exception", text="claimed"),
        Stopped(generation=0, rank=0, report={}), ReplaceRank(rank=0, reason="claimed"),
        Break(generation=0, reason="claimed"), End(status=3, reason="claimed"), StopRun(),
        StoreRequest(generation=7, number=1, call="set", keys=("key",), values=("eA==",)),
    ]  # fmt: skip
    say(port, *false, hello("n0", agent.address))
    *_, refused = say(port, *join("n7", ""), ends_with=End)
    assert isinstance(refused, End)
    program = refused.reason.partition("the run has ")[2]
    *_, named = say(port, *join("n0", program), ends_with=End)
    assert named == End(status=2, reason="another agent is named 'n0'; set --node-name")
    say(port, *join("n1", program), *false, ends_with=Beat)
    say(port, *join("n8", program, 7), *false, ends_with=Beat)


def test_a_run_listens_nowhere_beyond_the_table_and_strangers_break_no_more_than_a_generation(
    run: Run, undisturbed: Undisturbed
) -> None:
    """Nor do members with false claims."""
    # Two generations are over by then.
    breaks = [fault("raise", "forward", 0, step) for step in (1, 2)]
    place = fault("wait", "forward", 1, 3)
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--join-deadline-s", "60")
    write_token(run.folder / "token")
    for node in ("n0", "n1"):
        file = str(run.folder / "token")
        run.start(
            node, *options, "--token-file", file, variables=plan(*breaks, place, NOTE=run.note)
        )
    run.wait_for_note()
    memory = {agent.pid: read_bytes(agent.pid) for agent in run.agents.values()}
    claim(run.port)
    agents = {agent.pid for agent in run.agents.values()}
    found = {
        ("agent" if pid in agents else "worker", host, port)
        for pid in run.processes()
        for host, port in listening(pid)
    }
    by_agents = [port for who, _, port in found if who == "agent" and port != run.port]

    with ExitStack() as strangers:
        for _, _, port in found:
            for said in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(8 << 20), *[b""] * 100):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.settimeout(1)
                with suppress(OSError):
                    stranger.sendall(said)
        grown_bytes = [read_bytes(pid) - had_bytes for pid, had_bytes in memory.items()]
        (waiting,) = (pid for pid in descendants(run.agents["n1"].pid) if listening(pid))
        os.kill(waiting, signal.SIGKILL)
        statuses = [run.wait(node) for node in run.agents]

    assert {(who, host) for who, host, port in found if port != run.port} == {
        ("agent", "127.0.0.1"),
        ("worker", "127.0.0.1"),
    }
    # The one for the others; the first agent has that of the endpoint. No store has one.
    assert len(by_agents) == 1
    assert statuses == [0, 0], run.show()
    assert max(grown_bytes) < 64 << 20
    assert set(run.digests().values()) == {undisturbed(2, 6)}

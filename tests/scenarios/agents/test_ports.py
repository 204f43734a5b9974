"""Where the processes of a run listen, as docs/recovery.md says, and what strangers do there."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack

from tests.processes import descendants
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, listening, plan
from tests.tokens import write_token


def test_a_run_listens_nowhere_beyond_the_table_and_strangers_break_no_more_than_a_generation(
    run: Run, undisturbed: Undisturbed
) -> None:
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
    agents = {agent.pid for agent in run.agents.values()}
    found = {
        ("agent" if pid in agents else "worker", host, port)
        for pid in run.processes()
        for host, port in listening(pid)
    }
    by_agents = [port for who, _, port in found if who == "agent" and port != run.port]

    with ExitStack() as strangers:
        for _, _, port in found:
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
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
    assert set(run.digests().values()) == {undisturbed(2, 6)}

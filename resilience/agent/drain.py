"""Asks a node to leave its run: python -m resilience.agent drain NODE --run-dir DIR.

It leaves as it does on SIGTERM to its agent, which this finds by the word that every agent keeps in
the run's folder. For whoever is not on the node, or does not know the agent's process.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.connections.transport import Gone, Heard
from resilience.agent.evidence.records import find_last_end
from resilience.agent.evidence.words import find_words
from resilience.arguments import Parser, read_token
from resilience.comm.messages import Drain, Drained
from resilience.runtime.door import AGENTS
from resilience.runtime.tls import Tls, read_tls

_ANSWER_S = 10.0
"""How long an agent may take to answer."""


def main(arguments: Sequence[str]) -> int:
    """Ask for what the command line says; returns 0 where the node is about to leave."""
    parser = Parser(prog="resilience.agent drain", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "node", metavar="NODE", help="name of the node, as the run's events have it"
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run")
    parser.add_argument(
        "--token-file",
        dest="token",
        type=read_token,
        help="file with the token of the run's agents (default: they have none)",
    )
    parser.add_argument("--tls", action="store_true", help="the run has cluster.tls")
    options = parser.parse_args(arguments)
    tls = read_tls(parser, is_asked=options.tls, token=options.token or "")
    words = find_words(options.run_dir)
    addresses = [each["address"] for each in words if each["node"] == options.node]
    # Of a run that has ended the word of an agent that was killed may be left.
    ended = find_last_end(options.run_dir)
    if not addresses and ended is not None:
        parser.error(
            f"argument --run-dir: the run in {options.run_dir} has ended with exit status {ended}; "
            "allowed: the folder of a run that has not ended"
        )
    if not words:
        parser.error(
            f"argument --run-dir: {options.run_dir} has no word of an agent; allowed: the folder "
            "of a run that has not ended"
        )
    if not addresses:
        nodes = ", ".join(sorted({each["node"] for each in words}))
        parser.error(
            f"argument NODE: no agent of {options.node!r} is known in {options.run_dir}; there "
            f"are: {nodes}"
        )
    # An agent that was killed has left its word, too: the newest start is asked first.
    problems = []
    for address in addresses:
        problem = ask(options.node, address, options.token or "", tls)
        if not problem:
            sys.stdout.write(f"{options.node} is about to leave the run\n")
            return 0
        problems.append(problem)
    # The port of one that has ended may be that of another run's agent by now.
    if set(problems) == {AGENTS.unproven}:
        given = "it holds another token than" if options.token else "none is given to reach"
        parser.error(
            f"argument --token-file: {given} the agents of the run; allowed: the file that "
            f"they were started with, as {options.run_dir / 'run.token'}"
        )
    listed = "; ".join(f"{each}: {why}" for each, why in zip(addresses, problems, strict=True))
    if ended is not None:
        listed = f"the run has ended with exit status {ended}; {listed}"
    sys.stderr.write(f"resilience.agent drain: {options.node} was not asked to leave: {listed}\n")
    return 1


def ask(node: str, address: str, token: str, tls: Tls | None) -> str:
    """Ask the agent at HOST:PORT to have this node leave; returns why it stays."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        transport = TcpTransport(listening, token=token, lease_s=_ANSWER_S, tls=tls)
        try:
            return _ask(transport, transport.connect(address), node)
        finally:
            transport.close()


def _ask(transport: TcpTransport, peer: int, node: str) -> str:
    transport.send(peer, Drain(node=node))
    waiting = select.poll()
    waiting.register(transport.fileno(), select.POLLIN)
    end_s = time.monotonic() + _ANSWER_S
    while (rest_s := end_s - time.monotonic()) > 0:
        due_s = transport.tick(time.monotonic()) - time.monotonic()
        waiting.poll(1000 * max(0.0, min(rest_s, due_s)))
        for arrival in transport.receive():
            if isinstance(arrival, Gone) and arrival.peer == peer:
                return arrival.reason
            if isinstance(arrival, Heard) and isinstance(arrival.message, Drained):
                return arrival.message.problem
    return f"it has not answered within {_ANSWER_S:g} s"

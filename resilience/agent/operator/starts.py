"""The agent's own words for a start by the operator: the place, the peers and the attempt. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from resilience.agent.operator.commands import UpdateBody
from resilience.agent.operator.states import RefusalError

_PORT = 29500
"""Port at which agents find each other, unless the operator names another."""


def refuse_size(options: argparse.Namespace, body: UpdateBody) -> None:
    """Raise RefusalError for a number of nodes that a run with recovery cannot have.

    Without recovery each start may be of another size.
    """
    low, high = options.nnodes
    sizes = options.sizes or (options.node_config.agent and [*range(low, high + 1)])
    if options.recovers and sizes and body.nnodes not in sizes:
        raise RefusalError(f"nnodes is {body.nnodes}; allowed by the agent's options: {sizes}")


def start_words(words: Sequence[str], options: argparse.Namespace, body: UpdateBody) -> list[str]:
    """Return the words of an agent's command line with those that a start adds."""
    place = words.index("--")
    return [*words[:place], *_own_words(options, body), *words[place:]]


def _own_words(options: argparse.Namespace, body: UpdateBody) -> Iterator[str]:
    hosts = {each.rank: str(each.ip) for each in body.rankIps}
    if options.local_addr and body.rank in hosts:
        hosts[body.rank] = options.local_addr
    asked = [hosts[rank] for rank in sorted(hosts)] or [body.master_addr]
    least = f"{min(options.sizes)}:" if options.sizes else ""
    yield f"--nnodes={least}{body.nnodes}"
    yield f"--rdzv-endpoint={','.join(_at(host, body.master_port or _PORT) for host in asked)}"
    yield f"--rdzv-attempt={body.faultCount}"
    # The operator stops all nodes: none goes on without the others.
    yield "--ends-run"
    if body.spare:
        # It joins a run that others begin, in the place of a node that is lost or late.
        yield "--further-node"
    if (own := hosts.get(body.rank)) is None:
        return
    yield f"--local-addr={own}"
    if (port := options.operator_peer_port) and len(hosts) > 1:
        # A daemon has its node's name, and of the others nothing but the address is known.
        yield f"--memoryd=--peer-listen={_at(own, port)}"
        yield from (f"--memoryd=--peer={host}={_at(host, port)}" for host in asked if host != own)


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

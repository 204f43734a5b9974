"""What a daemon is told of the daemons of other nodes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, PlainValidator

from resilience.arguments import add_options, is_loopback, parse_endpoint
from resilience.runtime.tls import Tls, read_tls
from resilience.settings import RamTier
from resilience.tiered.placement import Node

PEERS_MAX = 4096
_PEERS_BYTES_MAX = 1 << 20
_NAME_CHARS_MAX = 256
_FORM = "NAME=HOST:PORT, or NAME=HOST:PORT;domain=D;switch=S"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What the door to other nodes is told."""

    own: Node
    """With an address, it introduces itself to nodes that were not told of it."""
    listen: tuple[str, int]
    peers: tuple[Node, ...]
    """The others, each with the address of its door; a domain that is not known is empty."""
    replicas: int = 1
    """How many of them are to have a copy of each shard."""
    holds_instead: bool = False
    """They are to have it instead of this node, which lets go of what was written to it."""
    token: str = ""
    """What everybody has to know; without it, the door belongs on loopback."""
    tls: Tls | None = None
    gone_s: float = 10.0
    """Who is silent for so long is gone."""


def parse_peer(text: str) -> Node:
    """Return a node of NAME=HOST:PORT[;domain=D][;switch=S]; raises ArgumentTypeError."""
    first, *more = text.strip().split(";")
    name, _, address = first.partition("=")
    labels = dict(each.partition("=")[::2] for each in more if each)
    if not 0 < len(name) <= _NAME_CHARS_MAX or not address or labels.keys() - {"domain", "switch"}:
        raise argparse.ArgumentTypeError(f"{text!r} is no peer; want {_FORM}")
    parse_endpoint(address)
    return Node(
        name=name, domain=labels.get("domain", ""), switch=labels.get("switch", ""), address=address
    )


def _read_peers(text: str) -> Sequence[Node]:
    try:
        with Path(text).open("rb") as file:
            content = file.read(_PEERS_BYTES_MAX + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from error
    if len(content) > _PEERS_BYTES_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {_PEERS_BYTES_MAX} bytes")
    return [parse_peer(line) for line in _without_comments(content.splitlines())]


def _without_comments(lines: Iterable[str]) -> Iterable[str]:
    stripped = (line.partition("#")[0].strip() for line in lines)
    return (line for line in stripped if line)


class _Peers(BaseModel):
    """What the command line says of a node and the others."""

    peer_listen: Annotated[tuple[str, int] | None, PlainValidator(parse_endpoint)] = None
    """HOST:PORT to listen at for the daemons of other nodes."""
    peer: tuple[Annotated[Node, PlainValidator(parse_peer)], ...] = ()
    """Another node's daemon, once for each: NAME=HOST:PORT, or NAME=HOST:PORT;domain=D;switch=S;
    domain is what fails together with it (default: what it says itself), switch what it is plugged
    into."""
    peers_file: Annotated[Sequence[Node] | None, PlainValidator(_read_peers)] = None
    """File with one peer a line, written likewise. This node's own says where it listens, so that
    those get to know it that were started before it and told of others."""
    switch: str = ""
    """What this node is plugged into; others there are near."""
    tls: bool = False
    """Encrypt connections to other nodes, with keys that derive from the token; for all nodes
    alike."""
    peer_gone_s: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """A node that is silent for so long is gone."""


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a command line."""
    group = parser.add_argument_group("other nodes")
    add_options(group, _Peers)
    add_options(group, RamTier, {"replicas": 1, "peers_hold": "copies"})


def read_peer_settings(
    parser: argparse.ArgumentParser, given: argparse.Namespace, own: Node, token: str
) -> PeerSettings | None:
    """Return what the options say; ends the process with one message where they are wrong."""
    tls = read_tls(parser, is_asked=given.tls, token=token)
    named = (*given.peer, *(given.peers_file or ()))
    peers = tuple(each for each in named if each.name != own.name)
    address = next((each.address for each in named if each.name == own.name), "")
    listen = given.peer_listen
    if listen is None:
        if peers:
            parser.error("argument --peer: needs --peer-listen, since other nodes connect, too")
        if given.peers_hold == "instead":
            parser.error("argument --peers-hold: instead needs --peer-listen and other nodes")
        return None
    if given.peers_hold == "instead" and not given.replicas:
        parser.error(
            "argument --replicas: 0 is not allowed with --peers-hold instead; want at least 1"
        )
    if not token and not is_loopback(listen[0]):
        parser.error(
            f"argument --peer-listen: {listen[0]!r} can be reached from other machines, which "
            "needs --token-file; without it, an address of loopback is allowed"
        )
    if len({each.name for each in peers}) < len(peers) or len(peers) > PEERS_MAX:
        parser.error(f"argument --peer: want each name once, and {PEERS_MAX} at most")
    return PeerSettings(
        own=replace(own, address=address),
        listen=listen,
        peers=peers,
        replicas=given.replicas,
        holds_instead=given.peers_hold == "instead",
        token=token,
        tls=tls,
        gone_s=given.peer_gone_s,
    )

"""What a daemon is told on its command line."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, PlainValidator

from resilience.arguments import add_options, is_loopback, parse_endpoint, read_token
from resilience.node_config import MemorydConfig, add_config_argument, parse_config
from resilience.settings import Count, Seconds
from resilience.tiered.memoryd.peer_options import (
    PeerSettings,
    add_peer_options,
    read_peer_settings,
)
from resilience.tiered.memoryd.store_options import (
    KeepOptions,
    add_store_options,
    read_keep_options,
)
from resilience.tiered.uploads import Settings

_PROG = "python -m resilience.tiered.memoryd"
_SOCKET_PATH_BYTES_MAX = 107
_SETTLE_S = 1.0
"""With other nodes, how long a step is whole before it is sent to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorydOptions:
    """What a daemon is told on its command line, once it is read and checked."""

    folder: Path
    """Where the segments are; belongs on tmpfs."""
    budget_bytes: int
    http: tuple[str, int] | None
    """Host and port of the HTTP door; None: there is none."""
    http_open: bool = False
    """The HTTP door asks for no token, as AWS's client sends none."""
    token: str
    """What everybody has to know who comes through a door; empty: nothing."""
    node: str
    domain: str
    """What fails together with this node."""
    connections_max: int
    idle_s: float
    remove_on_exit: bool
    expire_s: float = 86400.0
    """Arenas beside this one that nobody has used for so long are removed."""
    kept: KeepOptions = field(default_factory=lambda: KeepOptions(settings=Settings()))
    """What stays in memory, and the store below it."""
    peers: PeerSettings | None = None
    """The daemons of other nodes and the door to them; None: this node is alone."""
    lease_s: float | None = None
    """How long it goes on without an agent that supervises it; None: until it is told to end."""
    ready_file: int | None = None
    """Descriptor that says to an agent that all doors are open."""
    arguments: tuple[str, ...] = ()
    """Its command line, but for what differs from one start to the next."""


def default_folder() -> Path:
    """Return where the daemon of this user keeps its segments, if it is not told."""
    return Path(f"/dev/shm/memoryd-{os.geteuid()}")


def parse_options(arguments: Sequence[str] | None) -> MemorydOptions:
    """Return the options; ends the process with status 2 and one message where they are wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    config = parse_config(_PROG, words)
    parser = _make_parser()
    if config and config.memoryd:
        parser.set_defaults(**_defaults(config.memoryd))
    given = parser.parse_args(words)
    if given.budget_mib is None:
        parser.error("the following arguments are required: --budget-mib")
    folder: Path = given.dir.absolute()
    token: str = given.token_file or ""
    if len(os.fsencode(folder / "memoryd.sock")) > _SOCKET_PATH_BYTES_MAX:
        parser.error(
            f"argument --dir: {str(given.dir)!r} is too long; with memoryd.sock in it, it may "
            f"have {_SOCKET_PATH_BYTES_MAX} bytes"
        )
    size_mib = _size_mib(folder)
    if given.budget_mib > size_mib:
        parser.error(
            f"argument --budget-mib: {given.budget_mib} is more than the {size_mib} MiB of the "
            f"file system of {folder}"
        )
    if given.http and not token and not is_loopback(given.http[0]):
        parser.error(
            f"argument --http: {given.http[0]!r} can be reached from other machines, which needs "
            "--token-file; without it, an address of loopback is allowed, as 127.0.0.1:9200"
        )
    if given.http_open and not (given.http and is_loopback(given.http[0])):
        parser.error(
            "argument --http-open: allowed only with --http on an address of loopback, as "
            "127.0.0.1:9200"
        )
    node: str = given.node or socket.gethostname()
    domain: str = given.domain or node
    peers = read_peer_settings(parser, given, node=node, domain=domain, token=token)
    return MemorydOptions(
        folder=folder,
        budget_bytes=given.budget_mib << 20,
        http=given.http,
        http_open=given.http_open,
        token=token,
        node=node,
        domain=domain,
        connections_max=given.connections_max,
        idle_s=given.idle_s,
        remove_on_exit=given.remove_on_exit,
        expire_s=given.expire_s,
        kept=read_keep_options(parser, given, settle_s=_SETTLE_S if peers else 0.0),
        peers=peers,
        lease_s=given.lease_s,
        ready_file=given.ready_file,
        arguments=tuple(word for word in words if not word.startswith("--ready-file=")),
    )


def _defaults(config: MemorydConfig) -> dict[str, Any]:
    """Return what a file says by the names of options, which are those of the settings."""
    store = config.store.model_dump() if config.store else {}
    return {
        **config.ram.model_dump(),
        **{f"store_{name}": value for name, value in store.items()},
        "store": store.get("url"),
        "budget_mib": config.budget_mib,
        # AWS's library sends no token; only processes of this node reach loopback.
        "http": ("127.0.0.1", config.http_port) if config.http_port else None,
        "http_open": config.http_port is not None,
        **({"drain_s": config.drain_s} if config.drain_s is not None else {}),
    }


class _Start(BaseModel):
    """What differs from node to node, or from start to start."""

    dir: Path = default_folder()
    """Folder of segments and socket, on tmpfs."""
    http: Annotated[tuple[str, int] | None, PlainValidator(parse_endpoint)] = None
    """HOST:PORT to listen at for the protocol of AWS's client library; its own port is 9200."""
    http_open: bool = False
    """That door asks for no token: AWS's library sends none; on loopback only."""
    token_file: Annotated[str | None, PlainValidator(read_token)] = None
    """File with what everybody has to know (default: nothing, and the user alone may come in)."""
    node: str | None = None
    """Name of this node (default: its host name)."""
    domain: str | None = None
    """What fails together with this node (default: the node alone)."""
    connections_max: Count = 128
    """Connections at a time of processes of this node."""
    idle_s: Seconds = 3600.0
    """A connection that is silent for so long is ended, and with it what it was writing."""
    remove_on_exit: bool = False
    """Take the segments away at the end; else the next daemon finds them."""
    expire_s: Seconds = 86400.0
    """Remove arenas of this user beside --dir that no daemon has used for so long."""
    ready_file: int | None = None
    """An agent's own: descriptor to write to when all doors are open."""


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Keep this node's checkpoints in memory, whatever happens to its workers.",
        allow_abbrev=False,
    )
    add_config_argument(parser)
    add_options(parser, _Start)
    add_options(parser, MemorydConfig, {"budget_mib": None, "lease_s": None, "drain_s": 20.0})
    add_store_options(parser)
    add_peer_options(parser)
    return parser


def _size_mib(folder: Path) -> int:
    """Return the size of the file system that a folder is in, or will be."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_frsize * status.f_blocks >> 20

"""What a daemon is told on its command line."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, PlainValidator

from resilience.arguments import Parser, add_options, is_loopback, parse_endpoint, read_token
from resilience.node_config import MemorydConfig, add_config_argument, parse_config, remove_drain_s
from resilience.settings import DRAIN_S, Count, RamTier, Seconds, StoreTier
from resilience.tiered.catalog import LowerTier
from resilience.tiered.memoryd.peer_options import (
    PeerSettings,
    add_peer_options,
    read_peer_settings,
)
from resilience.tiered.memoryd.session import LocalSettings
from resilience.tiered.memoryd.shelf import Shelf
from resilience.tiered.placement import Node
from resilience.tiered.stores.choice import (
    OF_S3,
    StoreSettings,
    make_settings,
    open_settings,
    parse_place,
)
from resilience.tiered.stores.folder import FolderSettings
from resilience.tiered.uploads import Cadence, Settings, TierSettings

_PROG = "python -m resilience.tiered.memoryd"
_SOCKET_PATH_BYTES_MAX = 107
_SETTLE_S = 1.0
"""With other nodes, how long a step is whole before it is sent to the store."""
_NOTES = {
    "domains_min": "2; with --peers-hold instead not more than replicas",
    "every_n_steps": "1, but for --store-every-s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """What stays where, for how long."""

    settings: Settings
    store: StoreSettings | None = None
    """The lower tier; None: what no memory holds is lost."""
    drain_s: float = DRAIN_S
    """How long the end waits for what the store has to get, where the arena stays."""
    is_required: bool = False
    """The arena never goes before the store has what it is to get."""

    @property
    def remove_s(self) -> float:
        """Return how long it waits where the arena goes."""
        return remove_drain_s(self.drain_s, self.store.deadline_s if self.store else 0.0)

    def open_shelf(self) -> Shelf | None:
        """Return the store as this daemon sees it; connects to nothing yet."""
        if self.store is None:
            return None
        store = open_settings(self.store)
        if isinstance(self.store, FolderSettings):
            return Shelf(store, "folder", str(self.store.folder))
        place = "/".join(each for each in (self.store.bucket, self.store.prefix.strip("/")) if each)
        return Shelf(store, "s3", place)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorydOptions:
    """What a daemon is told on its command line, once it is read and checked."""

    folder: Path
    """Where the segments are; belongs on tmpfs."""
    budget_bytes: int
    http: tuple[str, int] | None
    """Host and port of the HTTP door; None: there is none."""
    http_open: bool
    """The HTTP door asks for no token, as AWS's client sends none."""
    local: LocalSettings
    """The door to processes of this node, and what all doors know: who it is, and the token."""
    remove_on_exit: bool
    expire_s: float
    """Arenas beside this one that nobody has used for so long are removed."""
    kept: KeepOptions
    """What stays in memory, and the store below it."""
    peers: PeerSettings | None
    """The daemons of other nodes and the door to them; None: this node is alone."""
    lease_s: float | None
    """How long it goes on without an agent that supervises it; None: until it is told to end."""
    ready_file: int | None
    """Descriptor that says to an agent that all doors are open."""


def default_folder() -> Path:
    """Return where the daemon of this user keeps its segments, if it is not told."""
    return Path(f"/dev/shm/memoryd-{os.geteuid()}")


def parse_options(arguments: Sequence[str] | None) -> MemorydOptions:
    """Return the options; ends the process with status 2 and one message where they are wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    config = parse_config(_PROG, words)
    parser = _make_parser()
    if config.memoryd:
        parser.set_defaults(**_defaults(config.memoryd))
    given = parser.parse_args(words)
    if given.config_digest not in (None, config.memoryd and config.memoryd.digest()):
        parser.error(
            f"argument --config-digest: {given.config_digest!r} is not that of --config "
            f"{str(given.config)!r}, which has been changed since the agent read it"
        )
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
    _check_http(parser, given, token)
    name = given.node or socket.gethostname()
    own = Node(name=name, domain=given.domain or name, switch=given.switch)
    peers = read_peer_settings(parser, given, own, token)
    return MemorydOptions(
        folder=folder,
        budget_bytes=given.budget_mib << 20,
        http=given.http,
        http_open=given.http_open,
        local=LocalSettings(
            own=own,
            token=token,
            connections_max=given.connections_max,
            idle_s=given.idle_s,
            arguments=tuple(word for word in words if not word.startswith("--ready-file=")),
        ),
        remove_on_exit=given.remove_on_exit,
        expire_s=given.expire_s,
        kept=_read_keep_options(parser, given, settle_s=_SETTLE_S if peers else 0.0),
        peers=peers,
        lease_s=given.lease_s,
        ready_file=given.ready_file,
    )


def _check_http(parser: argparse.ArgumentParser, given: argparse.Namespace, token: str) -> None:
    if given.http and not token and not is_loopback(given.http[0]):
        parser.error(
            f"argument --http: {given.http[0]!r} can be reached from other machines, which needs "
            "--token-file; without it, an address of loopback is allowed, as 127.0.0.1:9200"
        )
    if given.tls and given.http and not is_loopback(given.http[0]):
        parser.error(
            f"argument --tls: the HTTP door at {given.http[0]!r} has no TLS; allowed: an address "
            "of loopback, as --http 127.0.0.1:9200"
        )
    if given.http_open and not (given.http and is_loopback(given.http[0])):
        parser.error(
            "argument --http-open: allowed only with --http on an address of loopback, as "
            "127.0.0.1:9200"
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
    run_dir: Path = Path()
    """Folder of the run, in which a store folder:NAME is."""
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
    config_digest: str | None = None
    """An agent's own: what --config has to say of the daemon."""


def _place(text: str) -> tuple[LowerTier, str]:
    try:
        return parse_place(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _Store(BaseModel):
    """What the command line says in its own way."""

    store: Annotated[tuple[LowerTier, str] | None, PlainValidator(_place)] = None
    """Where steps go that have to outlive all nodes, folder:PATH or s3://BUCKET/PREFIX
    (default: nowhere)."""


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROG,
        description="Keep this node's checkpoints in memory, whatever happens to its workers.",
        allow_abbrev=False,
    )
    add_config_argument(parser)
    add_options(parser, _Start)
    add_options(parser, MemorydConfig, {"budget_mib": None, "lease_s": None, "drain_s": DRAIN_S})
    group = parser.add_argument_group("what is kept, and the store")
    add_options(group, RamTier, {"keep": 1, "domains_min": None}, notes=_NOTES)
    add_options(group, _Store)
    unset = dict.fromkeys(StoreTier.model_fields.keys() - {"url"})
    defaults = {**unset, "deadline_s": 60.0, "path_style": False, "required": False}
    add_options(group, StoreTier, defaults, prefix="store_", notes=_NOTES)
    add_peer_options(parser)
    return parser


def _size_mib(folder: Path) -> int:
    """Return the size of the file system that a folder is in, or will be."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_frsize * status.f_blocks >> 20


def _read_keep_options(
    parser: argparse.ArgumentParser, given: argparse.Namespace, *, settle_s: float
) -> KeepOptions:
    """Return what the options say; ends the process with one message where they are wrong."""
    settings = _read_settings(parser, given, settle_s)
    if given.store_every_n_steps and given.store_every_s:
        parser.error("argument --store-every-s: not allowed with --store-every-n-steps")
    told = {name: getattr(given, f"store_{name}") for name in OF_S3}
    told["force_path_style"] = given.store_path_style
    changed = {name: value for name, value in told.items() if value}
    if given.store is None:
        needing = (given.store_every_n_steps, given.store_every_s, given.store_keep)
        if changed or any(needing) or given.store_waiting_max or given.store_required:
            parser.error("argument --store: has to be given with the other options of the store")
        return KeepOptions(settings=settings)
    tier, place = given.store
    if tier == "folder" and changed:
        parser.error("argument --store: endpoint, region, parts and attempts are of s3:// alone")
    try:
        if tier == "folder":
            # An absolute one stays what it is.
            place = str(given.run_dir.absolute() / place)
        store = make_settings(tier, place, deadline_s=given.store_deadline_s, **changed)
    except ValueError as error:
        parser.error(f"argument --store: {error}")
    every_n_steps = given.store_every_n_steps
    if every_n_steps is None and given.store_every_s is None:
        every_n_steps = 1
    lower = TierSettings(
        cadence=Cadence(every_n_steps=every_n_steps, every_s=given.store_every_s),
        keep=given.store_keep,
        waiting_max=given.store_waiting_max,
    )
    settings = replace(settings, lower={tier: lower})
    return KeepOptions(
        settings=settings, store=store, drain_s=given.drain_s, is_required=given.store_required
    )


def _read_settings(
    parser: argparse.ArgumentParser, given: argparse.Namespace, settle_s: float
) -> Settings:
    """Return what the options say of memory."""
    keepers = given.replicas if given.peers_hold == "instead" else 0
    domains_min = given.domains_min or (min(2, keepers) if keepers else 2)
    if keepers and domains_min > keepers:
        parser.error(
            f"argument --domains-min: {domains_min} is more than --replicas {keepers}, and with "
            f"--peers-hold instead nobody else has a shard; 1 to {keepers} is allowed"
        )
    return Settings(
        keep=given.keep,
        domains_min=domains_min,
        keepers=keepers,
        settle_s=settle_s,
        expire_s=given.expire_s,
    )

"""What an agent is told on its command line: how it is read, and what comes of it."""

from __future__ import annotations

import argparse
import ipaddress
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, PlainValidator

from resilience.agent.coordination.membership import Options
from resilience.arguments import parse_endpoint, read_as, read_token
from resilience.settings import Count, Seconds, Whole

_NAME_BYTES_MAX = 255


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    count = read_as(Count)
    numbers = (count(low), count(high or low))
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has more nodes at least than at most")
    return numbers


def _endpoints(text: str) -> tuple[str, ...]:
    endpoints = tuple(text.split(","))
    for endpoint in endpoints:
        parse_endpoint(endpoint)
    return endpoints


def _local_address(text: str) -> str:
    try:
        is_name = bool(text.encode("idna"))
    except UnicodeError:
        is_name = False
    with suppress(ValueError):  # a name
        is_name = not ipaddress.ip_address(text).is_unspecified
    if not is_name:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address that others can reach; want the address of one interface"
        )
    return text


def _node_name(text: str) -> str:
    is_name = text.isprintable() and "/" not in text and text not in (".", "..")
    if not is_name or len(text.encode()) > _NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be the name of a folder, which the node's logs are in; want at most "
            f"{_NAME_BYTES_MAX} bytes without '/'"
        )
    return text


class StartOptions(BaseModel):
    """What differs from node to node, or from start to start."""

    nnodes: Annotated[tuple[int, int], PlainValidator(_nodes)] = (1, 1)
    """MIN:MAX nodes of the job; those beyond MIN stand by."""
    rdzv_endpoint: Annotated[tuple[str, ...], PlainValidator(_endpoints)] = ("127.0.0.1:29500",)
    """HOST:PORT where agents find each other first; several with commas between, best of all
    nodes."""
    rdzv_id: str = "0"
    """Name of this run at the endpoint."""
    rdzv_attempt: Whole = 0
    """How often its scheduler has started this run again, which ends what it had started before."""
    local_addr: Annotated[str | None, PlainValidator(_local_address)] = None
    """Address of this node for the others (default: found)."""
    token_file: Annotated[str | None, PlainValidator(read_token)] = None
    """File with the run's token, the same for all agents (default: none, and loopback alone)."""
    node_name: Annotated[str | None, PlainValidator(_node_name)] = None
    """Name of this node (default: its host name)."""
    run_dir: Path = Path("run")
    """Folder for events and logs."""
    warm: Literal["imports", "program"] = "imports"
    """How far a spare comes: imports, or the program up to its block, which then may not read RANK
    before it."""
    preload: tuple[str, ...] = ()
    """Module that is imported once (default torch and torch._dynamo)."""
    term_deadline_s: Seconds | None = None
    """How long workers may take to end after SIGTERM (default 15; without recovery 30)."""
    memoryd: tuple[str, ...] = ()
    """An argument for the checkpoint daemon that --config describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told on its command line."""

    node: str
    run_id: str
    """Name of the run and its attempt, which agents of others do not belong to."""
    endpoints: tuple[str, ...]
    """HOST:PORT of agents that others find first."""
    host: str
    """Address under which other agents reach this one."""
    token: str = field(repr=False)
    """What all agents of the run know; empty where they listen on loopback alone."""
    num_spares: int
    hang_deadline_s: float
    term_deadline_s: float
    """How long workers may take to end after SIGTERM."""
    coordinator: Options

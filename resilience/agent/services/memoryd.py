"""The node's checkpoint daemon, as a service of its agent."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilience.agent.services.services import Service
from resilience.agent.services.supervision import ServiceLimits
from resilience.arguments import read_token
from resilience.node_config import MemorydConfig

_SOCKET_NAME = "memoryd.sock"
_TRY_S = 45.0
"""Until a daemon says whether its store can be used; it says so itself before."""
_MARGIN_S = 5.0
"""A daemon that ends itself is not killed just before it does."""


def memoryd_service(
    config: MemorydConfig,
    *,
    path: Path,
    node: str,
    run_dir: Path,
    log: Path,
    more: Sequence[str],
    variables: Mapping[str, str],
) -> Service:
    """Return the daemon that the file `path` describes, with `more` arguments of this start.

    Workers find it by the variables MEMORYD_DIR and MEMORYD_TOKEN_FILE, and so does the agent.
    Raises ValueError where one of them is not set or names no token.
    """
    folder = variables.get("MEMORYD_DIR")
    token_file = variables.get("MEMORYD_TOKEN_FILE")
    if not folder or not token_file:
        name = "MEMORYD_TOKEN_FILE" if folder else "MEMORYD_DIR"
        raise ValueError(f"the variable {name} is not set, which --config {path} asks for")
    try:
        token = read_token(token_file)
    except ArgumentTypeError as error:
        raise ValueError(f"MEMORYD_TOKEN_FILE {error}") from error
    return Service(
        name="memoryd",
        command=(sys.executable, "-m", "resilience.tiered.memoryd"),
        arguments=(
            f"--config={path}",
            # Of another start, the same path may have said something else.
            f"--config-digest={config.digest()}",
            f"--dir={folder}",
            f"--run-dir={run_dir.absolute()}",
            f"--token-file={token_file}",
            f"--node={node}",
            f"--lease-s={config.lease_s:g}",
            *more,
        ),
        socket=Path(folder) / _SOCKET_NAME,
        token=token,
        node=node,
        log=log,
        limits=ServiceLimits(
            end_s=config.end_s(removes=False) + _MARGIN_S,
            remove_s=config.end_s(removes=True) + _MARGIN_S,
            try_s=_TRY_S if config.store else 0.0,
            is_external=config.is_external,
        ),
        duty="bring what it holds to the store" if config.store else "end",
        loss=_loss(config, folder),
        is_required=config.store is not None and config.store.required,
    )


def _loss(config: MemorydConfig, folder: str) -> str:
    """Return what becomes of checkpoints that the store has not got when the daemon ends."""
    if config.store is None:
        return ""
    if config.store.required:
        return f"what it had not brought to the store stays in {folder}"
    return "what it had not brought to the store is not there"

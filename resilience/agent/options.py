"""What an agent is told on its command line: how it is read, and what comes of it."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, PlainValidator

from resilience.agent.connections.address import find_head, own_address
from resilience.agent.coordination.membership import Options
from resilience.agent.operator.options import OperatorOptions, refuse_operator
from resilience.arguments import (
    Parser,
    add_options,
    is_loopback,
    parse_endpoint,
    read_as,
    read_token,
)
from resilience.inprocess.variables import GLOO_CONNECTS_LATE
from resilience.node_config import (
    AgentConfig,
    ProgramConfig,
    add_config_argument,
    parse_config,
)
from resilience.progress import find_problem
from resilience.runtime.tls import read_tls
from resilience.settings import CheckpointlessSettings, Count, Seconds, Whole

_PROG = "python -m resilience.agent"
_DESCRIPTION = """\
Run one node's workers: python -m resilience.agent [options] -- python PROGRAM.

One agent runs on every node. Together they start the program on every rank,
replace the processes that die or hang, and keep the others going. PROGRAM is
`-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS`.
"""
_NAME_BYTES_MAX = 240
_AS_IN_FILES = ("stages", "sizes", "hold_s", "scale_up_snooze_s", "faulty_scale_down_timeout_s")
_SAME = {name: AgentConfig.model_fields[name].default for name in _AS_IN_FILES}
_JOB = {"workers_per_node": 1, "shards": None, "max_restarts": 0, **_SAME}
_RECOVERY = {
    "transfer_buffer_mib": 32,
    "spares_per_node": None,
    "standby_nodes": 0,
    "hang_deadline_s": 300.0,
    "stop_deadline_s": 15.0,
    "join_deadline_s": 120.0,
    "lease_s": 3.0,
    "partition_patience_s": 600.0,
    "process_restarts_max": 10,
    "restart_window_s": 21600,
    "restarts_forgiven_after_steps": 100,
    "restarts_without_progress_max": 3,
    "last_save_deadline_s": 300.0,
}
_ONLY_WITH = (*_RECOVERY, "node_state_command")
_ALSO_WITHOUT = {"spares_per_node", "standby_nodes", "join_deadline_s", "lease_s"}
"""Of these, those that have a use without recovery, or a message of their own."""
_NAMES = {
    "workers_per_node": "nproc_per_node",
    "sizes": "size",
    "spares_per_node": "spares",
    "process_restarts_max": "restarts_max",
}
_NOTES = {"spares_per_node": "1; without recovery 0"}


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    count = read_as(Count)
    numbers = (count(low), count(high or low))
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has more nodes at least than at most")
    return numbers


def _endpoints(text: str) -> tuple[str, ...]:
    endpoints = tuple(text.split(","))
    places = [parse_endpoint(endpoint) for endpoint in endpoints]
    for endpoint, place in zip(endpoints, places, strict=True):
        if places.count(place) > 1:
            raise argparse.ArgumentTypeError(f"{text!r} has {endpoint} twice; want each node once")
        _reachable(place[0])
    return endpoints


def _reachable(text: str) -> str:
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
    is_name = text.isprintable() and "/" not in text and text not in ("", ".", "..")
    if not is_name or len(text.encode()) > _NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be the name of a folder, which the node's logs are in; want 1 to "
            f"{_NAME_BYTES_MAX} bytes without '/'"
        )
    return text


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError(f"{text!r} names no folder; want a path, as run")
    return Path(text)


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command line: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} begins with no program that is found; want PROGRAM ARGUMENTS, to which the "
            "node's name is added"
        )
    return words


class StartOptions(BaseModel):
    """What differs from node to node, or from start to start."""

    nnodes: Annotated[tuple[int, int], PlainValidator(_nodes)] = (1, 1)
    """MIN:MAX nodes of the job; those beyond MIN stand by."""
    rdzv_endpoint: Annotated[tuple[str, ...] | None, PlainValidator(_endpoints)] = None
    """HOST:PORT where agents find each other first; several with commas between, best of all
    nodes (default: none, for a run of one node)."""
    rdzv_id: str = "0"
    """Name of this run at the endpoint; without an endpoint 0 stands for the run folder's."""
    rdzv_attempt: Whole = 0
    """How often its scheduler has started this run again, which ends what it had started before."""
    further_node: bool = False
    """Whether this node may come when the run has ended: it then ends as the run has, and never
    begins it anew."""
    ends_run: bool = False
    """Whether the run stops where this node is asked to end, though it could go on without it."""
    awaits_nodes: bool = False
    """Whether a node that is asked to end leaves the run, which waits for another one in its place:
    its scheduler starts one."""
    local_addr: Annotated[str | None, PlainValidator(_reachable)] = None
    """Address of this node for the others (default: found)."""
    token_file: Annotated[str | None, PlainValidator(read_token)] = None
    """File with the run's token, the same for all agents (default: none, and loopback alone)."""
    tls: bool = False
    """Encrypt connections to other agents and, of the checkpoint daemon, to other daemons, with
    keys that derive from the token; for all nodes alike."""
    node_name: Annotated[str | None, PlainValidator(_node_name)] = None
    """Name of this node (default: its host name)."""
    run_dir: Annotated[Path, PlainValidator(_folder)] = Path("run")
    """Folder for events and logs."""
    node_state_command: Annotated[tuple[str, ...] | None, PlainValidator(_command)] = None
    """PROGRAM ARGUMENTS to which the name of a silent node is added: it prints off, or booted and
    the Unix seconds of the node's last boot (default: none)."""
    warm: Literal["imports", "program"] = "imports"
    """How far a spare comes: imports, or the program up to its block, which then may not read RANK
    before it."""
    preload: tuple[str, ...] = ()
    """Module that is imported once (default torch and torch._dynamo)."""
    term_deadline_s: Seconds | None = None
    """How long workers may take to end after SIGTERM (default 15; without recovery 30)."""
    grace_s: Seconds | None = None
    """How long they may take where the agent itself is asked to end, for the step that is under way
    and the save of the last one (default --term-deadline-s)."""
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
    is_single: bool
    """Whether no endpoint was given, so that this node is the whole run."""
    host: str
    """Address under which other agents reach this one."""
    token: str = field(repr=False)
    """What all agents of the run know; empty where they listen on loopback alone."""
    num_spares: int
    hang_deadline_s: float
    term_deadline_s: float
    """How long workers may take to end after SIGTERM."""
    grace_s: float
    """How long they may take where the agent was asked to end."""
    program: str
    """What its workers run, in words; those of all agents run the same."""
    node_state_command: tuple[str, ...] | None = None
    """Says whether a silent node is off, or has booted."""
    ends_run: bool = False
    """Whether the run stops where the agent was asked to end, whatever its sizes."""
    made: tuple[Path, ...] = ()
    """Files that the agent has made in the run's folder; all gone means a removed folder."""
    still_deadline_s: float | None = None
    """How long a user's program may show no step; null: for ever."""
    is_script: bool = False
    """Whether workers run a program of a user's."""
    coordinator: Options

    def find_head(self, generation: int) -> str:
        """Return HOST:PORT of this node where no process listens, another one each generation."""
        return find_head(self.host, f"{self.run_id} {self.node} {generation}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends the process with status 2 where they are wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in words:
        place = words.index("--")
        words, command = words[:place], words[place + 1 :]
    parser = _make_parser()
    config = parse_config(_PROG, words)
    parser.set_defaults(node_config=config, script=config.agent.program if config.agent else None)
    if config.agent:
        parser.set_defaults(**_defaults(config.agent))
    options = parser.parse_args(words)
    _refuse_useless(parser, options, words)
    options.program = (
        _find_script(parser, command, options.script)
        if options.script
        else _program(parser, command)
    )
    world_size = options.nnodes[0] * options.workers_per_node
    if options.shards and world_size % options.shards:
        parser.error(
            f"argument --shards: {options.shards} does not divide the world size {world_size} "
            f"(--nnodes {options.nnodes[0]} x --nproc-per-node {options.workers_per_node})"
        )
    if (options.shards or 1) % options.stages:
        parser.error(
            f"argument --stages: {options.stages} does not divide --shards {options.shards or 1}, "
            "the ranks that together hold one copy of the state"
        )
    for name in options.preload:
        _check_module(parser, "--preload", name)
    _refuse_contradictions(parser, options)
    refuse_operator(parser, options)
    _complete(parser, options)
    if options.operator_port is None or options.operator_link:
        # Else the operator says later where the nodes are.
        _complete_place(parser, options)
    return options


def _defaults(config: AgentConfig) -> dict[str, Any]:
    """Return what a file says by the names of options, which are those of the settings."""
    recovery = config.checkpointless
    return {
        **config.model_dump(),
        "nnodes": (config.nodes_min, config.nodes_max),
        "recovers": recovery is not None,
        **(recovery.model_dump() if recovery else {}),
    }


def _refuse_useless(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: Sequence[str]
) -> None:
    """End the process where an option would change nothing."""
    given = {each.partition("=")[0] for each in words}
    names = [] if options.recovers else [each for each in _ONLY_WITH if each not in _ALSO_WITHOUT]
    for name in names:
        option = f"--{_NAMES.get(name, name)}".replace("_", "-")
        if option in given:
            parser.error(
                f"argument {option}: of no use without recovery, where any fault ends all workers "
                "and starts them again; leave it out, or --no-recovery"
            )
    if options.memoryd and options.node_config.memoryd is None:
        parser.error(
            f"argument --memoryd: {options.memoryd[0]!r} is for a checkpoint daemon that --config "
            "describes, and there is none; leave it out, or give such a --config"
        )


def _refuse_recovery(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process where an option needs the recovery that there is not."""
    low, high = options.nnodes
    if options.warm == "program":
        parser.error(
            "argument --warm: program is not allowed with --no-recovery, under which no worker "
            "waits in a block; want imports"
        )
    if options.standby_nodes or high > low:
        option = "--standby-nodes" if options.standby_nodes else "--nnodes"
        value = options.standby_nodes or f"{low}:{high}"
        parser.error(
            f"argument {option}: {value} lets nodes stand by, which needs recovery; leave out "
            "--no-recovery, or start as many nodes as the job has"
        )
    if options.spares_per_node:
        parser.error(
            f"argument --spares: {options.spares_per_node} is not allowed with --no-recovery, "
            "which starts all workers again at once; want 0"
        )


def _refuse_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process where the run could not have one of its sizes."""
    low, high = options.nnodes
    if not options.sizes:
        return
    shown = ", ".join(map(str, options.sizes))
    if min(options.sizes) != low:
        parser.error(
            f"argument --size: the least of {shown} has to be the {low} of --nnodes {low}:{high}"
        )
    if not options.recovers:
        parser.error(f"argument --size: {shown} needs recovery; leave out --no-recovery")
    shards, num_ranks = options.shards or 1, options.workers_per_node
    splits_copy = any(size * num_ranks % shards for size in options.sizes)
    if options.stages > 1 or splits_copy or (num_ranks % shards and shards % num_ranks):
        parser.error(
            f"argument --size: {shown} is not allowed where that is not whole copies of the state "
            f"on whole nodes: --shards {options.shards} and --stages {options.stages} with "
            f"--nproc-per-node {num_ranks}"
        )


def _refuse_contradictions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process where options do not go together."""
    low, high = options.nnodes
    if high < low:
        parser.error(f"argument --config: agent.nodes_max {high} is less than nodes_min {low}")
    _refuse_sizes(parser, options)
    if options.standby_nodes and high > low and not options.sizes:
        parser.error(
            f"argument --standby-nodes: {options.standby_nodes} is not allowed with --nnodes "
            f"{low}:{high}, whose nodes beyond {low} stand by; want one of the two"
        )
    if not options.recovers:
        _refuse_recovery(parser, options)
        return
    if options.partition_patience_s < options.lease_s:
        parser.error(
            f"argument --partition-patience-s: {options.partition_patience_s:g} is less than "
            f"--lease-s {options.lease_s:g}, before which nobody is silent; want at least that"
        )
    if (value := os.environ.get(GLOO_CONNECTS_LATE, "")) not in ("", "0"):
        parser.error(
            f"{GLOO_CONNECTS_LATE} is {value!r}: connections made later could not be broken at a "
            "fault; unset it, or add --no-recovery"
        )
    if options.max_restarts:
        parser.error(
            f"argument --max-restarts: {options.max_restarts} counts restarts of all workers, "
            "which a run with recovery has none of; set --restarts-max, or add --no-recovery"
        )


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in what depends on other options, or on this machine."""
    options.tls = read_tls(parser, is_asked=options.tls, token=options.token_file or "")
    options.node_name = options.node_name or socket.gethostname()
    if options.spares_per_node is None:
        options.spares_per_node = int(options.recovers)
    if options.term_deadline_s is None:
        options.term_deadline_s = 15.0 if options.recovers else 30.0
    if options.grace_s is None:
        options.grace_s = options.term_deadline_s


def _complete_place(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in where the nodes of the run are."""
    low, high = options.nnodes
    num_nodes = max(high, low + options.standby_nodes, *options.sizes)
    if num_nodes > 1 and not options.rdzv_endpoint:
        parser.error(
            f"argument --rdzv-endpoint: none is given for up to {num_nodes} nodes; give all agents "
            "of the run one HOST:PORT, as 127.0.0.1:29500 on one machine"
        )
    if not options.rdzv_endpoint:
        options.rdzv_endpoint = ()
        if options.rdzv_id == "0":
            path = bytes(options.run_dir.resolve())
            options.rdzv_id = blake2b(path, digest_size=8).hexdigest()
    if options.local_addr is None:
        hosts = [parse_endpoint(each)[0] for each in options.rdzv_endpoint]
        options.local_addr = own_address(hosts or ["127.0.0.1"])
    if not options.token_file and not is_loopback(options.local_addr):
        parser.error(
            f"argument --token-file: none is given, and others reach {options.local_addr!r}; give "
            "all agents of the run one file, made by (umask 077; head -c 32 /dev/urandom | base64 "
            ">token); without it an address of loopback is allowed, as --local-addr 127.0.0.1"
        )


def _program(parser: argparse.ArgumentParser, command: list[str]) -> tuple[str, ...]:
    """Return what follows the interpreter's name."""
    if command and Path(command[0]).name.startswith("python"):
        command = command[1:]
    is_module = command[:1] == ["-m"] and len(command) > 1
    if is_module:
        _check_module(parser, "-m", command[1])
    files = [Path(*command[:1], name) for name in ("", "__main__.py")]
    if not (is_module or (command and any(each.is_file() for each in files))):
        parser.error(
            f"no program in {' '.join(command)!r}; workers are forked from a Python process, so "
            "after -- comes: python -m MODULE ARGUMENTS, or python SCRIPT ARGUMENTS, where SCRIPT "
            "is a file or a folder with __main__.py"
        )
    return tuple(command)


def _find_script(
    parser: argparse.ArgumentParser, command: list[str], script: ProgramConfig
) -> tuple[str, ...]:
    """Return the command of a user's program, which is found from its folder."""
    if problem := find_problem(script.progress):
        parser.error(f"argument --config: agent.program.progress: {problem}")
    folder = Path(script.folder or "").absolute()
    if not folder.is_dir():
        parser.error(f"argument --config: agent.program.folder: no folder {str(folder)!r} here")
    words = list(command) or [""]
    at = int(Path(words[0]).name.startswith("python"))
    if not script.executed:
        words, at = words[at:] or [""], 0
    elif "/" not in words[0] and shutil.which(words[0]) is None:
        words[0] = f"./{words[0]}"
    if script.executed and shutil.which(folder / words[0] if "/" in words[0] else words[0]) is None:
        parser.error(f"no program {command[:1]} on PATH or in {folder} that can be executed")
    if words[at:] and words[at] == "-m" and not script.executed:
        _check_module(parser, "-m", "".join(words[1:2]), [str(folder)])
    # Options of an interpreter may come before the script.
    elif not script.executed or (at and "".join(words[1:2]).endswith(".py")):
        path = folder / words[at]
        if not (path.is_file() or (path / "__main__.py").is_file()):
            parser.error(f"no script {str(path)!r}; want a file, or a folder with __main__.py")
    return tuple(words)


def _check_module(
    parser: argparse.ArgumentParser, option: str, name: str, folders: Sequence[str] = ()
) -> None:
    """End the process where there is no such module; a package's own is found when it is run."""
    top = name.partition(".")[0]
    is_beside = bool(top and PathFinder.find_spec(top, folders))
    if not is_beside and (not top or importlib.util.find_spec(top) is None):
        parser.error(
            f"argument {option}: no module {top!r} for {name!r}; want one that Python finds here, "
            "or on PYTHONPATH"
        )


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=_PROG,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config_argument(parser)
    add_options(parser, StartOptions, notes={"nnodes": "1"})
    parser.add_argument("--no-recovery", dest="recovers", action="store_false",
        help="at a fault end all workers of all nodes and start them again")  # fmt: skip
    add_options(parser, OperatorOptions)
    add_options(parser, AgentConfig, _JOB, names=_NAMES)
    add_options(parser, CheckpointlessSettings, _RECOVERY, names=_NAMES, notes=_NOTES)
    return parser

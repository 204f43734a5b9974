"""Run one node's workers: python -m resilience.agent [options] -- python PROGRAM.

One agent runs on every node. Together they start the program on every rank,
replace the processes that die or hang, and keep the others going. PROGRAM is
`-m MODULE ARGUMENTS` or `SCRIPT ARGUMENTS`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, PlainValidator

from resilience.agent.coordination.agent_connection import listen, own_address
from resilience.agent.coordination.membership import GAVE_UP_STATUS, Options
from resilience.agent.options import AgentOptions
from resilience.agent.processes.output import LogFolder, say
from resilience.agent.processes.workers import Program, WorkerPool, ZygoteError, ZygoteLostError
from resilience.agent.services.memoryd import memoryd_service
from resilience.agent.services.services import Service, Services
from resilience.arguments import add_options, parse_endpoint, read_as
from resilience.comm.page import Page, create_page
from resilience.events import EventLog
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.variables import MAX_RESTARTS, NCCL_ERRORS, NUM_THREADS, RUN_ID
from resilience.node_config import AgentConfig, MemorydConfig, add_config_argument, parse_config
from resilience.settings import CheckpointlessSettings, Count, Seconds
from resilience.state.state_files import create_state_files
from resilience.state.transfer_buffer import create_transfer_buffer

if TYPE_CHECKING:  # it imports torch, and a mistake in the options should not wait for that
    from resilience.agent.agent import Agent

_PROG = "python -m resilience.agent"
_SPARE_SLOTS = 8
_NAME_BYTES_MAX = 255
# The second is what every optimizer of torch imports when it is made.
_PRELOAD = ("torch", "torch._dynamo")


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    count = read_as(Count)
    numbers = (count(low), count(high or low))
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has more nodes at least than at most")
    return numbers


def _endpoint(text: str) -> str:
    parse_endpoint(text)
    return text


def _node_name(text: str) -> str:
    is_name = text.isprintable() and "/" not in text and text not in (".", "..")
    if not is_name or len(text.encode()) > _NAME_BYTES_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be the name of a folder, which the node's logs are in; want at most "
            f"{_NAME_BYTES_MAX} bytes without '/'"
        )
    return text


class _Start(BaseModel):
    """What differs from node to node, or from start to start."""

    nnodes: Annotated[tuple[int, int], PlainValidator(_nodes)] = (1, 1)
    """MIN:MAX nodes of the job; those beyond MIN stand by."""
    rdzv_endpoint: Annotated[str, PlainValidator(_endpoint)] = "127.0.0.1:29500"
    """HOST:PORT where agents find each other first."""
    rdzv_id: str = "0"
    """Name of this run at the endpoint."""
    local_addr: str | None = None
    """Address of this node for the others (default: found)."""
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


_JOB = {"workers_per_node": 1, "shards": None, "max_restarts": 0}
_RECOVERY = {
    "transfer_buffer_mib": 32,
    "spares_per_node": None,
    "standby_nodes": 0,
    "hang_deadline_s": 300.0,
    "stop_deadline_s": 15.0,
    "join_deadline_s": 120.0,
    "process_restarts_max": 10,
    "restarts_without_progress_max": 3,
}
_ALSO_WITHOUT = {"spares_per_node", "standby_nodes", "join_deadline_s"}
"""Of these, those that have a use without recovery, or a message of their own."""
_NAMES = {
    "workers_per_node": "nproc_per_node",
    "spares_per_node": "spares",
    "process_restarts_max": "restarts_max",
}
_NOTES = {"spares_per_node": "1; without recovery 0"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of a job and return the job's exit status."""
    options = parse_options(arguments)
    log_folder = options.run_dir / "logs" / options.node_name
    logs = LogFolder(log_folder, options.node_name)
    try:
        services = _services(options, log_folder)
        logs.prepare()
        # A full disk is no reason to stop a run that survives without its record.
        events = EventLog(
            options.run_dir / "events.jsonl",
            node=options.node_name,
            rank=None,
            generation=-1,
            complain=partial(say, options.node_name),
        )
    except ValueError as error:
        return _complain(str(error), 2)
    except OSError as error:
        return _complain(f"cannot write to --run-dir {options.run_dir}: {error}")
    host = options.local_addr or own_address(options.rdzv_endpoint.rpartition(":")[0])
    try:
        listener = listen(host)
    except OSError as error:
        return _complain(f"cannot listen on {host!r}: {error}; set --local-addr")
    with events, listener, closing(logs):
        kept = Services(services, partial(say, options.node_name), events.write)
        return _run(options, host, listener, logs, events, kept)


def _run(
    options: argparse.Namespace,
    host: str,
    listener: socket.socket,
    logs: LogFolder,
    events: EventLog,
    services: Services,
) -> int:
    try:
        handles = _make_handles(options)
    except (OSError, OverflowError) as error:
        return _complain(
            f"no memory for --transfer-buffer-mib {options.transfer_buffer_mib} "
            f"x {options.workers_per_node} workers: {error}"
        )
    program = Program(
        command=options.program,
        preload=tuple(options.preload or _PRELOAD),
        warm=options.warm,
        handles=handles,
        variables=_worker_variables(options),
    )
    pool = WorkerPool(program, logs)
    # These import torch, while the pool's processes do so as well.
    from resilience.agent.agent import Agent
    from resilience.agent.restarting import RestartingAgent

    make_agent = Agent if options.recovers else RestartingAgent
    agent = make_agent(
        _agent_options(options, host),
        pool=pool,
        page=Page(handles.page_file, handles.num_slots),
        events=events,
        listener=listener,
        services=services,
    )
    status = 1
    try:
        status = _serve(agent, options)
    finally:
        pool.close()
        services.end(removes=status == 0)
    return status


def _make_handles(options: argparse.Namespace) -> WorkerHandles:
    """Make what workers share with the agent; OSError where there is no memory for it."""
    num_slots = options.workers_per_node + options.spares_per_node + _SPARE_SLOTS
    transfer_bytes = options.transfer_buffer_mib << 20
    transfer_file, state_files = -1, tuple[int, ...]()
    page_file = create_page(num_slots)
    if options.recovers:
        _check_memory(options.workers_per_node * transfer_bytes)
        transfer_file = create_transfer_buffer(options.workers_per_node, transfer_bytes)
        state_files = tuple(create_state_files(options.workers_per_node))
    return WorkerHandles(
        agent_file=-1,
        page_file=page_file,
        transfer_file=transfer_file,
        state_files=state_files,
        slot=-1,
        num_slots=num_slots,
        num_local_ranks=options.workers_per_node,
        transfer_bytes=transfer_bytes,
        node=options.node_name,
        agent_pid=os.getpid(),
        recovers=options.recovers,
    )


def _services(options: argparse.Namespace, logs: Path) -> list[Service]:
    """Return what runs beside the workers; ValueError where it is not said how."""
    config: MemorydConfig | None = options.node_config.memoryd
    if config is None:
        return []
    return [
        memoryd_service(
            config,
            path=options.config,
            node=options.node_name,
            log=logs / "memoryd.log",
            more=options.memoryd,
            variables=os.environ,
        )
    ]


def _serve(agent: Agent, options: argparse.Namespace) -> int:
    """Find the other agents, and run until the job has ended."""
    from resilience.agent.coordination.leader import StoreError
    from resilience.agent.coordination.rendezvous import RendezvousError, find_leader

    # To look for the others may take long, and no signal would be heard meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        leader = find_leader(
            options.rdzv_endpoint, options.rdzv_id, agent.address, timeout_s=options.join_deadline_s
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: agent.stop(number))
        # A terminal that is closed asks for the same; workers know no such signal.
        signal.signal(signal.SIGHUP, lambda number, frame: agent.stop(signal.SIGTERM))
        return agent.run(leader)
    except ZygoteLostError as error:
        return _complain(f"{error}, and all workers of this node with it", GAVE_UP_STATUS)
    except (RendezvousError, StoreError, ZygoteError, ConnectionError) as error:
        return _complain(str(error))


def _worker_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what torchrun tells each worker beside its rank."""
    max_restarts = options.process_restarts_max if options.recovers else options.max_restarts
    return {
        MAX_RESTARTS: str(max_restarts),
        RUN_ID: options.rdzv_id,
        # Also for one worker: a process whose imports start threads cannot be forked.
        NUM_THREADS: os.environ.get(NUM_THREADS, "1"),
        NCCL_ERRORS: os.environ.get(NCCL_ERRORS, "1"),
    }


def _agent_options(options: argparse.Namespace, host: str) -> AgentOptions:
    return AgentOptions(
        node=options.node_name,
        host=host,
        num_spares=options.spares_per_node,
        hang_deadline_s=options.hang_deadline_s,
        term_deadline_s=options.term_deadline_s,
        coordinator=Options(
            num_nodes=options.nnodes[0],
            num_standby_nodes=options.standby_nodes + options.nnodes[1] - options.nnodes[0],
            num_local_ranks=options.workers_per_node,
            num_shards=options.shards or 1,
            is_sharded=options.shards is not None,
            join_deadline_s=options.join_deadline_s,
            # Without recovery workers stop as they do at SIGTERM: by ending.
            stop_deadline_s=(
                options.stop_deadline_s if options.recovers else options.term_deadline_s
            ),
            recovers=options.recovers,
            restarts_max=(
                options.process_restarts_max if options.recovers else options.max_restarts
            ),
            restart_window_s=options.restart_window_s,
            restarts_without_progress_max=options.restarts_without_progress_max,
        ),
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends the process with status 2 where they are wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in words:
        place = words.index("--")
        words, command = words[:place], words[place + 1 :]
    parser = _make_parser()
    config = parse_config(_PROG, words)
    parser.set_defaults(node_config=config)
    if config.agent:
        parser.set_defaults(**_defaults(config.agent))
    options = parser.parse_args(words)
    _refuse_useless(parser, options, words)
    options.program = _program(parser, command)
    world_size = options.nnodes[0] * options.workers_per_node
    if options.shards and world_size % options.shards:
        parser.error(
            f"argument --shards: {options.shards} does not divide the world size {world_size} "
            f"(--nnodes {options.nnodes[0]} x --nproc-per-node {options.workers_per_node})"
        )
    options.node_name = options.node_name or socket.gethostname()
    _complete(parser, options)
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
    names = [] if options.recovers else [each for each in _RECOVERY if each not in _ALSO_WITHOUT]
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


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Hold options against each other, and fill in those that depend on others."""
    low, high = options.nnodes
    if high < low:
        parser.error(f"argument --config: agent.nodes_max {high} is less than nodes_min {low}")
    if not options.recovers and options.warm == "program":
        parser.error(
            "argument --warm: program is not allowed with --no-recovery, under which no worker "
            "waits in a block; want imports"
        )
    if not options.recovers and (options.standby_nodes or high > low):
        option = "--standby-nodes" if options.standby_nodes else "--nnodes"
        value = options.standby_nodes or f"{low}:{high}"
        parser.error(
            f"argument {option}: {value} lets nodes stand by, which needs recovery; leave out "
            "--no-recovery, or start as many nodes as the job has"
        )
    if not options.recovers and options.spares_per_node:
        parser.error(
            f"argument --spares: {options.spares_per_node} is not allowed with --no-recovery, "
            "which starts all workers again at once; want 0"
        )
    if options.recovers and options.max_restarts:
        parser.error(
            f"argument --max-restarts: {options.max_restarts} counts restarts of all workers, "
            "which a run with recovery has none of; set --restarts-max, or add --no-recovery"
        )
    if options.spares_per_node is None:
        options.spares_per_node = int(options.recovers)
    if options.term_deadline_s is None:
        options.term_deadline_s = 15.0 if options.recovers else 30.0


def _program(parser: argparse.ArgumentParser, command: list[str]) -> tuple[str, ...]:
    """Return what follows the interpreter's name."""
    if command and Path(command[0]).name.startswith("python"):
        command = command[1:]
    is_module = command[:1] == ["-m"] and len(command) > 1
    files = [Path(*command[:1], name) for name in ("", "__main__.py")]
    if not (is_module or (command and any(each.is_file() for each in files))):
        parser.error(
            f"no program in {' '.join(command)!r}; workers are forked from a Python process, so "
            "after -- comes: python -m MODULE ARGUMENTS, or python SCRIPT ARGUMENTS, where SCRIPT "
            "is a file or a folder with __main__.py"
        )
    return tuple(command)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config_argument(parser)
    add_options(parser, _Start, notes={"nnodes": "1"})
    parser.add_argument("--no-recovery", dest="recovers", action="store_false",
        help="at a fault end all workers of all nodes and start them again")  # fmt: skip
    add_options(parser, AgentConfig, _JOB, names=_NAMES)
    add_options(parser, CheckpointlessSettings, _RECOVERY, names=_NAMES, notes=_NOTES)
    parser.set_defaults(restart_window_s=21600.0)
    return parser


def _check_memory(size_bytes: int) -> None:
    """Raise OSError where memory would run out, which would end whatever the kernel chooses."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and size_bytes > (available := int(rest.split()[0]) << 10):
            raise OSError(
                f"{size_bytes >> 20} MiB is more than the {available >> 20} MiB there are"
            )


def _complain(text: str, status: int = 1) -> int:
    sys.stderr.write(f"resilience.agent: {text}\n")
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's stores have threads; to wait for them is nobody's business any more.
    os._exit(status)

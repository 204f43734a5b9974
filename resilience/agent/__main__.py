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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience.agent.connections.address import find_interface, listen_at, own_address
from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.coordination.folder import RunFolder
from resilience.agent.coordination.founding import attempt_name
from resilience.agent.coordination.membership import Options
from resilience.agent.options import AgentOptions, StartOptions
from resilience.agent.processes.output import Console, Output
from resilience.agent.processes.workers import WorkerPool
from resilience.agent.processes.zygote_process import Program, ZygoteError, ZygoteLostError
from resilience.agent.services.memoryd import memoryd_service
from resilience.agent.services.services import Service, Services
from resilience.arguments import add_options, is_loopback, parse_endpoint
from resilience.comm.messages import GAVE_UP_STATUS
from resilience.comm.page import Page, create_page
from resilience.events import EVENTS_NAME
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.variables import (
    GLOO_INTERFACE,
    MAX_RESTARTS,
    NCCL_ERRORS,
    NUM_THREADS,
    RUN_ID,
)
from resilience.node_config import AgentConfig, MemorydConfig, add_config_argument, parse_config
from resilience.settings import CheckpointlessSettings
from resilience.state.state_files import create_state_files
from resilience.state.transfer_buffer import create_transfer_buffer

if TYPE_CHECKING:  # it imports torch, and a mistake in the options should not wait for that
    from resilience.agent.agent import Agent

_PROG = "python -m resilience.agent"
_SAYS = "resilience.agent"
_SPARE_SLOTS = 8
_LAST_WRITES_S = 60.0
"""How long a run that has ended well waits for its folder to take what is to be written."""
_HASTY_WRITES_S = 5.0
"""How long any other run does."""
# The second is what every optimizer of torch imports when it is made.
_PRELOAD = ("torch", "torch._dynamo")


_JOB = {"workers_per_node": 1, "shards": None, "max_restarts": 0}
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
    "restarts_forgiven_after_steps": 100,
    "restarts_without_progress_max": 3,
    "last_save_deadline_s": 300.0,
}
_ALSO_WITHOUT = {"spares_per_node", "standby_nodes", "join_deadline_s", "lease_s"}
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
    host = options.local_addr
    log_folder = options.run_dir / "logs" / options.node_name
    try:
        services = _services(options, log_folder)
        output = Output(options.run_dir / EVENTS_NAME, log_folder, options.node_name)
    except ValueError as error:
        return _complain(str(error), 2)
    except OSError as error:
        return _complain(f"cannot write to --run-dir {options.run_dir}: {error}")
    try:
        listener, endpoint = listen_at(host, options.rdzv_endpoint)
    except OSError as error:
        return _complain(f"cannot listen on {host!r}: {error}; set --local-addr")
    status = 1
    try:
        with listener:
            status = _run(options, host, (listener, endpoint), output, services)
    finally:
        # Nothing presses a run that has ended well; who was asked to end is killed soon.
        output.close(_LAST_WRITES_S if status == 0 else _HASTY_WRITES_S)
    return status


def _run(
    options: argparse.Namespace,
    host: str,
    listening: tuple[socket.socket, int | None],
    output: Output,
    services: Sequence[Service],
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
    try:
        pool = WorkerPool(program, output)
    except OSError as error:
        return _complain(f"cannot start the process that forks workers: {error}")
    events = output.open_log()
    kept = Services(services, output.console.say, events.write)
    # These import torch, while the pool's processes do so as well.
    from resilience.agent.agent import Agent
    from resilience.agent.restarting import RestartingAgent

    make_agent = Agent if options.recovers else RestartingAgent
    lease_s = options.lease_s
    transport = TcpTransport(listening[0], token=options.token_file or "", lease_s=lease_s)
    folder = RunFolder(options.run_dir, run=options.rdzv_id, attempt=options.rdzv_attempt)
    # Who came before may know of a run that goes on, where the endpoints do not.
    endpoints = [*options.rdzv_endpoint, *folder.find_agents()]
    if listening[1] is not None:
        endpoints[listening[1]] = transport.address
    folder.announce(transport.address)
    agent = make_agent(
        _agent_options(options, host, tuple(dict.fromkeys(endpoints))),
        pool=pool,
        page=Page(handles.page_file, handles.num_slots),
        events=events,
        transport=transport,
        folder=folder,
        services=kept,
        console=output.console,
    )
    status = 1
    try:
        status = _serve(agent, output.console)
    finally:
        pool.close()
        agent.leave()
        kept.end(removes=status == 0)
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
        events_file=-1,
        events_path=os.path.abspath(options.run_dir / EVENTS_NAME),  # noqa: PTH100
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


def _serve(agent: Agent, console: Console) -> int:
    """Run until the job has ended."""
    from resilience.agent.coordination.stores import StoreError

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: agent.stop(number))
    # A terminal that is closed asks for the same; workers know no such signal.
    signal.signal(signal.SIGHUP, lambda number, frame: agent.stop(signal.SIGTERM))
    try:
        return agent.run()
    except ZygoteLostError as error:
        console.show(f"{_SAYS}: {error}")
        return GAVE_UP_STATUS
    except (StoreError, ZygoteError) as error:
        console.show(f"{_SAYS}: {error}")
        return 1


def _worker_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what torchrun tells each worker beside its rank."""
    max_restarts = options.process_restarts_max if options.recovers else options.max_restarts
    # What gloo listens on is then reached by nobody who does not reach the agent.
    interface = os.environ.get(GLOO_INTERFACE) or find_interface(options.local_addr)
    return {
        **({GLOO_INTERFACE: interface} if interface else {}),
        MAX_RESTARTS: str(max_restarts),
        RUN_ID: options.rdzv_id,
        # Also for one worker: a process whose imports start threads cannot be forked.
        NUM_THREADS: os.environ.get(NUM_THREADS, "1"),
        NCCL_ERRORS: os.environ.get(NCCL_ERRORS, "1"),
    }


def _agent_options(
    options: argparse.Namespace, host: str, endpoints: tuple[str, ...]
) -> AgentOptions:
    return AgentOptions(
        node=options.node_name,
        run_id=attempt_name(options.rdzv_id, options.rdzv_attempt),
        endpoints=endpoints,
        host=host,
        token=options.token_file or "",
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
            lease_s=options.lease_s,
            partition_patience_s=options.partition_patience_s,
            # Without recovery workers stop as they do at SIGTERM: by ending.
            stop_deadline_s=(
                options.stop_deadline_s if options.recovers else options.term_deadline_s
            ),
            recovers=options.recovers,
            restarts_max=(
                options.process_restarts_max if options.recovers else options.max_restarts
            ),
            restart_window_s=options.restart_window_s,
            restarts_forgiven_after_steps=options.restarts_forgiven_after_steps,
            restarts_without_progress_max=options.restarts_without_progress_max,
            last_save_deadline_s=options.last_save_deadline_s,
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
    if options.local_addr is None:
        hosts = (parse_endpoint(each)[0] for each in options.rdzv_endpoint)
        options.local_addr = own_address(hosts)
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
    add_options(parser, StartOptions, notes={"nnodes": "1"})
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
    sys.stderr.write(f"{_SAYS}: {text}\n")
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's stores have threads; to wait for them is nobody's business any more.
    os._exit(status)

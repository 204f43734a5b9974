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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from resilience.agent.agent_connection import listen, own_address
from resilience.agent.membership import GAVE_UP_STATUS, Options
from resilience.agent.options import AgentOptions
from resilience.agent.output import LogFolder
from resilience.agent.workers import Program, WorkerPool, ZygoteError, ZygoteLostError
from resilience.comm.page import Page, create_page
from resilience.events import EventLog
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.variables import MAX_RESTARTS, NCCL_ERRORS, NUM_THREADS, RUN_ID
from resilience.state.state_files import create_state_files
from resilience.state.transfer_buffer import create_transfer_buffer

if TYPE_CHECKING:  # it imports torch, and a mistake in the options should not wait for that
    from resilience.agent.agent import Agent

_SPARE_SLOTS = 8
# The second is what every optimizer of torch imports when it is made.
_PRELOAD = ("torch", "torch._dynamo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of a job and return the job's exit status."""
    options = parse_options(arguments)
    logs = LogFolder(options.run_dir / "logs" / options.node_name, options.node_name)
    try:
        logs.prepare()
        events = EventLog(
            options.run_dir / "events.jsonl", node=options.node_name, rank=None, generation=-1
        )
    except OSError as error:
        return _complain(f"cannot write to --run-dir {options.run_dir}: {error}")
    host = options.local_addr or own_address(options.rdzv_endpoint.rpartition(":")[0])
    try:
        listener = listen(host)
    except OSError as error:
        return _complain(f"cannot listen on {host!r}: {error}; set --local-addr")
    with events, listener:
        return _run(options, host, listener, logs, events)


def _run(
    options: argparse.Namespace,
    host: str,
    listener: socket.socket,
    logs: LogFolder,
    events: EventLog,
) -> int:
    num_slots = options.nproc_per_node + options.spares + _SPARE_SLOTS
    transfer_bytes = options.transfer_buffer_mib << 20
    transfer_file, state_files = -1, tuple[int, ...]()
    try:
        page_file = create_page(num_slots)
        if options.recovers:
            _check_memory(options.nproc_per_node * transfer_bytes)
            transfer_file = create_transfer_buffer(options.nproc_per_node, transfer_bytes)
            state_files = tuple(create_state_files(options.nproc_per_node))
    except (OSError, OverflowError) as error:
        return _complain(
            f"no memory for --transfer-buffer-mib {options.transfer_buffer_mib} "
            f"x {options.nproc_per_node} workers: {error}"
        )
    handles = WorkerHandles(
        agent_file=-1,
        page_file=page_file,
        transfer_file=transfer_file,
        state_files=state_files,
        slot=-1,
        num_slots=num_slots,
        num_local_ranks=options.nproc_per_node,
        transfer_bytes=transfer_bytes,
        node=options.node_name,
        agent_pid=os.getpid(),
        recovers=options.recovers,
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
        page=Page(page_file, num_slots),
        events=events,
        listener=listener,
    )
    try:
        return _serve(agent, options)
    finally:
        pool.close()
        logs.close()


def _serve(agent: Agent, options: argparse.Namespace) -> int:
    """Find the other agents, and run until the job has ended."""
    from resilience.agent.leader import StoreError
    from resilience.agent.rendezvous import RendezvousError, find_leader

    # To look for the others may take long, and no signal would be heard meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        leader = find_leader(
            options.rdzv_endpoint, options.rdzv_id, agent.address, timeout_s=options.join_deadline_s
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: agent.stop(number))
        return agent.run(leader)
    except ZygoteLostError as error:
        return _complain(f"{error}, and all workers of this node with it", GAVE_UP_STATUS)
    except (RendezvousError, StoreError, ZygoteError, ConnectionError) as error:
        return _complain(str(error))


def _worker_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what torchrun tells each worker beside its rank."""
    variables = {
        MAX_RESTARTS: str(options.restarts_max if options.recovers else options.max_restarts),
        RUN_ID: options.rdzv_id,
        NCCL_ERRORS: os.environ.get(NCCL_ERRORS, "1"),
    }
    if options.nproc_per_node > 1 and NUM_THREADS not in os.environ:
        variables[NUM_THREADS] = "1"
    return variables


def _agent_options(options: argparse.Namespace, host: str) -> AgentOptions:
    return AgentOptions(
        node=options.node_name,
        host=host,
        num_local_ranks=options.nproc_per_node,
        num_spares=options.spares,
        hang_deadline_s=options.hang_deadline_s,
        stop_deadline_s=options.stop_deadline_s,
        term_deadline_s=options.term_deadline_s,
        announce=partial(_announce, options.rdzv_id),
        coordinator=Options(
            num_nodes=options.nnodes[0],
            num_standby_nodes=options.standby_nodes + options.nnodes[1] - options.nnodes[0],
            num_local_ranks=options.nproc_per_node,
            num_shards=options.shards or 1,
            is_sharded=options.shards is not None,
            join_deadline_s=options.join_deadline_s,
            # Without recovery workers stop as they do at SIGTERM: by ending.
            stop_deadline_s=(
                options.stop_deadline_s if options.recovers else options.term_deadline_s
            ),
            recovers=options.recovers,
            restarts_max=options.restarts_max if options.recovers else options.max_restarts,
            restart_window_s=options.restart_window_s,
            restarts_without_progress_max=options.restarts_without_progress_max,
        ),
    )


def _announce(run_id: str, address: str) -> None:
    from resilience.agent.rendezvous import name_leader

    name_leader(run_id, address)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends the process with status 2 where they are wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in words:
        place = words.index("--")
        words, command = words[:place], words[place + 1 :]
    parser = _make_parser()
    options = parser.parse_args(words)
    options.program = _program(parser, command)
    world_size = options.nnodes[0] * options.nproc_per_node
    if options.shards and world_size % options.shards:
        parser.error(
            f"argument --shards: {options.shards} does not divide the world size {world_size} "
            f"(--nnodes {options.nnodes[0]} x --nproc-per-node {options.nproc_per_node})"
        )
    options.node_name = options.node_name or socket.gethostname()
    _complete(parser, options)
    return options


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Hold options against each other, and fill in those that depend on others."""
    low, high = options.nnodes
    if not options.recovers and (options.standby_nodes or high > low):
        option = "--standby-nodes" if options.standby_nodes else "--nnodes"
        value = options.standby_nodes or f"{low}:{high}"
        parser.error(
            f"argument {option}: {value} lets nodes stand by, which needs recovery; leave out "
            "--no-recovery, or start as many nodes as the job has"
        )
    if not options.recovers and options.spares:
        parser.error(
            f"argument --spares: {options.spares} is not allowed with --no-recovery, which "
            "starts all workers again at once; want 0"
        )
    if options.recovers and options.max_restarts:
        parser.error(
            f"argument --max-restarts: {options.max_restarts} counts restarts of all workers, "
            "which a run with recovery has none of; set --restarts-max, or add --no-recovery"
        )
    if options.spares is None:
        options.spares = int(options.recovers)
    if options.term_deadline_s is None:
        options.term_deadline_s = 15.0 if options.recovers else 30.0


def _program(parser: argparse.ArgumentParser, command: list[str]) -> tuple[str, ...]:
    """Return what follows the interpreter's name."""
    if command and Path(command[0]).name.startswith("python"):
        command = command[1:]
    is_module = command[:1] == ["-m"] and len(command) > 1
    is_script = bool(command) and not command[0].startswith("-")
    if not (is_module or is_script):
        parser.error(
            f"no program in {' '.join(command)!r}; workers are forked from a Python process, so "
            "after -- comes: python -m MODULE ARGUMENTS, or python SCRIPT ARGUMENTS"
        )
    return tuple(command)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m resilience.agent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nnodes", type=_nodes, default=(1, 1), metavar="MIN:MAX",
        help="nodes of the job; those beyond MIN stand by (default 1)")  # fmt: skip
    add("--standby-nodes", type=_count, default=0, help="further nodes that stand by (default 0)")
    add("--nproc-per-node", type=_positive, default=1, help="workers of each node (default 1)")
    add("--shards", type=_positive, metavar="N",
        help="ranks that together hold one copy of the state (default: each has one)")  # fmt: skip
    add("--rdzv-endpoint", default="127.0.0.1:29500", type=_endpoint, metavar="HOST:PORT",
        help="where agents find each other first")  # fmt: skip
    add("--rdzv-id", default="0", help="name of this run at the endpoint")
    add("--local-addr", help="address of this node for the others (default: found)")
    add("--node-name", help="name of this node (default: its host name)")
    add("--run-dir", type=Path, default=Path("run"), help="folder for events and logs")
    add("--no-recovery", dest="recovers", action="store_false",
        help="at a fault end all workers of all nodes and start them again")  # fmt: skip
    add("--max-restarts", type=_count, default=0, metavar="N",
        help="how often that is done in the run (default 0)")  # fmt: skip
    add("--spares", type=_count,
        help="warm processes without a rank (default 1; without recovery 0)")  # fmt: skip
    add("--warm", choices=("imports", "program"), default="imports",
        help="how far a spare comes: imports, or the program up to its block, which then may "
             "not read RANK before it (default imports)")  # fmt: skip
    add("--preload", action="append",
        help="module that is imported once (default torch and torch._dynamo)")  # fmt: skip
    add("--hang-deadline-s", type=_seconds, default=300.0,
        help="no progress of any rank for this long is a hang (default 300)")  # fmt: skip
    add("--stop-deadline-s", type=_seconds, default=15.0,
        help="how long a worker may take to stop after a fault (default 15)")  # fmt: skip
    add("--term-deadline-s", type=_seconds,
        help="how long workers may take to end after SIGTERM "
             "(default 15; without recovery 30)")  # fmt: skip
    add("--join-deadline-s", type=_seconds, default=120.0,
        help="how long nodes and replacements may take to come (default 120)")  # fmt: skip
    add("--restarts-max", type=_count, default=10, help="replacements in a window (default 10)")
    add("--restart-window-s", type=_seconds, default=21600.0, help="the window (default 6 h)")
    add("--restarts-without-progress-max", type=_count, default=3,
        help="faults in a row without a committed step (default 3)")  # fmt: skip
    add("--transfer-buffer-mib", type=_positive, default=32,
        help="shared memory of each worker for moving state (default 32)")  # fmt: skip
    return parser


def _nodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    numbers = (_positive(low), _positive(high or low))
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r} has more nodes at least than at most")
    return numbers


def _positive(text: str) -> int:
    number = _count(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 1")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text


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

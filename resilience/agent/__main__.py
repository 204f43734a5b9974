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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from resilience.agent import drain
from resilience.agent.agent import Agent
from resilience.agent.code import note_code
from resilience.agent.connections.address import find_interface, listen_at
from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.coordination.founding import attempt_name
from resilience.agent.coordination.membership import Options
from resilience.agent.evidence.earlier import await_earlier, find_newer_attempt
from resilience.agent.evidence.folder import RunFolder
from resilience.agent.evidence.words import find_words
from resilience.agent.operator.service import OperatedNode
from resilience.agent.options import AgentOptions, parse_options
from resilience.agent.processes.output import Console, Output
from resilience.agent.processes.steps import StepFinder
from resilience.agent.processes.workers import WorkerPool
from resilience.agent.processes.zygote import die_with_parent
from resilience.agent.processes.zygote_process import Program, ZygoteError, ZygoteLostError
from resilience.agent.program import describe_program
from resilience.agent.recovering import RecoveringAgent
from resilience.agent.restarting import RestartingAgent
from resilience.agent.services.memoryd import memoryd_service
from resilience.agent.services.services import Service, Services
from resilience.comm.messages import GAVE_UP_STATUS
from resilience.comm.page import Page, create_page
from resilience.elastic.policy import Policy
from resilience.event_files import EVENTS_NAME, node_events
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.variables import (
    GLOO_ASKS_ONCE,
    GLOO_INTERFACE,
    MAX_RESTARTS,
    NCCL_ERRORS,
    NCCL_LEAVES_THEM,
    NUM_THREADS,
    RUN_ID,
    UNBUFFERED,
)
from resilience.node_config import UNSTORED_STATUS, MemorydConfig
from resilience.run_record import (
    BRANCH_VARIABLE,
    GOES_ON_VARIABLE,
    RUN_VARIABLE,
    START_VARIABLE,
    TAKES_OVER_VARIABLE,
    RecordError,
    is_stored,
    make_run_id,
    note_start,
    open_record,
)
from resilience.state.state_files import create_state_files
from resilience.state.transfer_buffer import create_transfer_buffer
from resilience.tiered.arena_folder import open_arena

_SAYS = "resilience.agent"
_SPARE_SLOTS = 8
_LAST_WRITES_S = 60.0
"""How long a run that has ended well waits for its folder to take what is to be written."""
_HASTY_WRITES_S = 5.0
"""How long any other run does."""
# The second is what every optimizer of torch imports when it is made.
_PRELOAD = ("torch", "torch._dynamo")
# Ours, for a program that trains with torch: else each spare would import it as it starts.
_RUNTIME = (
    "resilience.checkpointless.recovery",
    "resilience.comm.reducer",
    "resilience.inprocess.block",
    "resilience.state.torch_state",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this node's part of a job and return the job's exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["drain"]:
        return drain.main(words[1:])
    options = parse_options(arguments)
    if options.operator_link:
        die_with_parent(options.operator_link[2])
    elif options.operator_port is not None:
        try:
            return OperatedNode(options, words, _num_slots(options)).serve()
        except OSError as error:
            return _complain(f"cannot serve --operator-port {options.operator_port}: {error}")
    complain = partial(_complain, link=options.operator_link)
    host = options.local_addr
    log_folder = options.run_dir / "logs" / options.node_name
    try:
        services = _services(options, log_folder)
        events = node_events(options.run_dir / EVENTS_NAME, options.node_name)
        output = Output(events, log_folder, options.node_name)
        output.tell_progress(os.environ, _num_steps(options))
        told = _note_start(options)
    except RecordError as error:
        return complain(str(error))
    except ValueError as error:
        return complain(str(error), 2)
    except OSError as error:
        return complain(f"cannot write to --run-dir {options.run_dir}: {error}")
    if problem := find_newer_attempt(options.run_dir, options.rdzv_id, options.rdzv_attempt):
        return complain(problem)
    name = attempt_name(options.rdzv_id, options.rdzv_attempt)
    # Before it listens: an agent that was on this node has its address.
    if problem := await_earlier(name, find_words(options.run_dir), output.console.say):
        return complain(problem)
    try:
        listener, endpoint = listen_at(host, options.rdzv_endpoint)
    except OSError as error:
        return complain(f"cannot listen on {host!r}: {error}; set --local-addr")
    if (number := told.get(START_VARIABLE, "0")) != "0":
        # The log has what the starts before have said, too.
        output.console.say(f"start {number} of the run begins, counted from 0")
    status = 1
    try:
        with listener:
            status = _run(options, host, (listener, endpoint), output, services, told)
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
    told: Mapping[str, str],
) -> int:
    complain = partial(_complain, link=options.operator_link)
    try:
        handles = _make_handles(options)
    except (OSError, OverflowError) as error:
        return complain(_no_memory(options, error))
    folder = _open_folder(options, told)
    if options.further_node and (ended := folder.records.find_end()) is not None:
        folder.close()
        return complain(f"the run has ended with exit status {ended} without this node", ended)
    events, page = output.open_log(), Page(handles.page_file, handles.num_slots)
    steps = StepFinder(
        options.script.progress if options.script else (),
        page=page,
        write=events.write,
        start=int(told.get(START_VARIABLE, "0")),
    )
    try:
        pool = WorkerPool(_program(options, handles, told, folder.hold_lock()), output, steps)
    except OSError as error:
        folder.close()
        return complain(f"cannot start the process that forks workers: {error}")
    events.write("agent_started", start=attempt_name(options.rdzv_id, options.rdzv_attempt))
    if script := options.script:
        code = script.folder or ("" if script.executed else options.program[0])
        note_code(Path(code).absolute(), events.write)
    note = _noting(events.write, folder) if told else events.write
    kept = Services(services, output.console.say, note, is_joining=folder.records.goes_on())
    make_agent = RecoveringAgent if options.recovers else RestartingAgent
    token = options.token_file or ""
    transport = TcpTransport(listening[0], token=token, lease_s=options.lease_s, tls=options.tls)
    endpoints = _find_endpoints(options, folder, listening[1], transport.address)
    folder.announce(transport.address, options.node_name)
    agent = make_agent(
        _agent_options(options, host, endpoints),
        pool=pool,
        page=page,
        events=events,
        transport=transport,
        folder=folder,
        services=kept,
        console=output.console,
    )
    status = 1
    try:
        status = _serve(agent, output.console, options.operator_link)
    finally:
        pool.close()
        agent.leave()
        is_done = kept.end(removes=status == 0)
        if agent.ending.end:
            _tell(options.operator_link, agent.ending.end.reason)
    return status or (0 if is_done else UNSTORED_STATUS)


def _program(
    options: argparse.Namespace, handles: WorkerHandles, told: Mapping[str, str], lock_file: int
) -> Program:
    return Program(
        command=options.program,
        preload=_preloaded(options),
        warm=options.warm,
        handles=handles,
        variables={**_worker_variables(options), **told},
        script=options.script,
        lock_file=lock_file,
    )


def _open_folder(options: argparse.Namespace, told: Mapping[str, str]) -> RunFolder:
    return RunFolder(
        options.run_dir,
        run=options.rdzv_id,
        attempt=options.rdzv_attempt,
        begins_anew=not options.further_node,
        number=int(told[START_VARIABLE]) if told else None,
    )


def _find_endpoints(
    options: argparse.Namespace, folder: RunFolder, own: int | None, address: str
) -> tuple[str, ...]:
    """Return where others are asked for the run; `own` is the index of this agent's address."""
    # Who came before may know of a run that goes on, where the endpoints do not.
    endpoints = [*(options.rdzv_endpoint or [address]), *folder.find_agents()]
    if own is not None:
        endpoints[own] = address
    return tuple(dict.fromkeys(endpoints))


def _noting(write: Callable[..., None], folder: RunFolder) -> Callable[..., None]:
    """Return what writes events of services, and has the record note the first stored step."""

    def note(event: str, **fields: Any) -> None:
        if event == "step_stored":
            folder.note_stored()
        write(event, **fields)

    return note


def _no_memory(options: argparse.Namespace, error: Exception) -> str:
    return (
        "no memory for resilience.checkpointless.transfer_buffer_mib "
        f"{options.transfer_buffer_mib} x {options.workers_per_node} workers: {error}"
    )


def _note_start(options: argparse.Namespace) -> dict[str, str]:
    """Note in the run's record that it is started; returns what workers are told of it.

    Nothing is noted of what no launcher has rendered.
    """
    config = options.node_config.run
    if config is None:
        return {}
    run_id = make_run_id(options.token_file or "", options.rdzv_id)
    record = open_record(options.run_dir, config, run_id=run_id, now=time.time())
    name = attempt_name(options.rdzv_id, options.rdzv_attempt)
    start = note_start(options.run_dir, config, name=name, now=time.time())
    return {
        RUN_VARIABLE: record.run_id,
        START_VARIABLE: str(start.number),
        GOES_ON_VARIABLE: str(int(config.goes_on or is_stored(options.run_dir))),
        TAKES_OVER_VARIABLE: str(int(config.takes_over)),
        # Of the run's first start: those that follow are not told.
        BRANCH_VARIABLE: record.branch.model_dump_json() if record.branch else "",
    }


def _num_steps(options: argparse.Namespace) -> int | None:
    """Return the steps of the run whose progress is told, None of a program that shows none."""
    is_shown = options.script is None or options.script.progress
    return options.progress_steps if is_shown else None


def _preloaded(options: argparse.Namespace) -> tuple[str, ...]:
    """Return what workers are forked with; nobody is given torch who has named other modules."""
    if options.script:
        return () if options.script.executed else tuple(options.preload)
    modules = tuple(options.preload or _PRELOAD)
    return (*modules, *_RUNTIME) if options.recovers and "torch" in modules else modules


def _num_slots(options: argparse.Namespace) -> int:
    return int(options.workers_per_node + options.spares_per_node + _SPARE_SLOTS)


def _make_handles(options: argparse.Namespace) -> WorkerHandles:
    """Make what workers share with the agent; OSError where there is no memory for it."""
    num_slots = _num_slots(options)
    transfer_bytes = options.transfer_buffer_mib << 20
    transfer_file, state_files = -1, tuple[int, ...]()
    page_file = options.operator_link[0] if options.operator_link else create_page(num_slots)
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
    # A cluster's manifest names a folder where the node is a pod, which has a memory of its own.
    if not os.environ.get("MEMORYD_DIR"):
        os.environ["MEMORYD_DIR"] = str(open_arena(options.run_dir, options.node_name))
    return [
        memoryd_service(
            config,
            path=options.config,
            node=options.node_name,
            run_dir=options.run_dir,
            log=logs / "memoryd.log",
            more=(*options.memoryd, *(("--tls",) if options.tls else ())),
            variables=os.environ,
        )
    ]


def _serve(agent: Agent, console: Console, link: Sequence[int] | None) -> int:
    """Run until the job has ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: agent.stop(number))
    # A terminal that is closed asks for the same; workers know no such signal.
    signal.signal(signal.SIGHUP, lambda number, frame: agent.stop(signal.SIGTERM))
    try:
        return agent.run()
    except ZygoteError as error:
        console.show(f"{_SAYS}: {error}")
        _tell(link, str(error))
        return GAVE_UP_STATUS if isinstance(error, ZygoteLostError) else 1


def _worker_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what torchrun tells each worker beside its rank.

    But for errors of NCCL where workers live on: torchrun has torch end the process then.
    """
    max_restarts = options.process_restarts_max if options.recovers else options.max_restarts
    # What gloo listens on is then reached by nobody who does not reach the agent.
    interface = os.environ.get(GLOO_INTERFACE) or find_interface(options.local_addr)
    script = options.script
    # By these torch knows itself under a torchrun.
    elastic = {MAX_RESTARTS: str(max_restarts), RUN_ID: options.rdzv_id}
    return {
        **({} if script and script.alone else elastic),
        **({UNBUFFERED: os.environ.get(UNBUFFERED, "1")} if script else {}),
        **({GLOO_INTERFACE: interface} if interface else {}),
        GLOO_ASKS_ONCE: os.environ.get(GLOO_ASKS_ONCE, "1"),
        # Also for one worker: a process whose imports start threads cannot be forked.
        NUM_THREADS: os.environ.get(NUM_THREADS, "1"),
        NCCL_ERRORS: os.environ.get(NCCL_ERRORS, NCCL_LEAVES_THEM if options.recovers else "1"),
    }


def _agent_options(
    options: argparse.Namespace, host: str, endpoints: tuple[str, ...]
) -> AgentOptions:
    still_deadline_s = options.script.hang_deadline_s if options.script else None
    # What has one name on the command line and for the coordinator.
    same = {each.name for each in fields(Options)} & vars(options).keys()
    told = {name: getattr(options, name) for name in same}
    if not options.recovers:
        # Workers stop as they do at SIGTERM: by ending.
        told["stop_deadline_s"] = options.term_deadline_s
    return AgentOptions(
        node=options.node_name,
        run_id=attempt_name(options.rdzv_id, options.rdzv_attempt),
        endpoints=endpoints,
        is_single=not options.rdzv_endpoint,
        host=host,
        token=options.token_file or "",
        program=describe_program(options.node_config.run),
        num_spares=options.spares_per_node,
        hang_deadline_s=min(options.hang_deadline_s, still_deadline_s or float("inf")),
        term_deadline_s=options.term_deadline_s,
        grace_s=options.grace_s,
        node_state_command=options.node_state_command,
        ends_run=options.ends_run,
        still_deadline_s=still_deadline_s,
        is_script=options.script is not None,
        made=(
            node_events(options.run_dir / EVENTS_NAME, options.node_name),
            options.run_dir / "logs" / options.node_name,
        ),
        coordinator=Options(
            num_nodes=options.nnodes[0],
            num_standby_nodes=options.standby_nodes + options.nnodes[1] - options.nnodes[0],
            num_local_ranks=options.workers_per_node,
            num_shards=options.shards or 1,
            is_sharded=options.shards is not None,
            num_stages=options.stages,
            restarts_max=(
                options.process_restarts_max if options.recovers else options.max_restarts
            ),
            **told,
            policy=Policy(
                sizes=tuple(sorted(set(options.sizes))),
                shrink_after_s=options.faulty_scale_down_timeout_s,
                hold_s=options.hold_s,
                snooze_s=options.scale_up_snooze_s,
            ),
        ),
    )


def _check_memory(size_bytes: int) -> None:
    """Raise OSError where memory would run out, which would end whatever the kernel chooses."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and size_bytes > (available := int(rest.split()[0]) << 10):
            raise OSError(
                f"{size_bytes >> 20} MiB is more than the {available >> 20} MiB there are"
            )


def _complain(text: str, status: int = 1, link: Sequence[int] | None = None) -> int:
    sys.stderr.write(f"{_SAYS}: {text}\n")
    _tell(link, text)
    return status


def _tell(link: Sequence[int] | None, text: str) -> None:
    """Tell the process that answers an operator why the run has ended."""
    if link:
        # A pipe takes so much at once.
        os.write(link[1], text.encode()[:4000])


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:
        # While it imports: an agent that runs ends in order.
        status = _complain("asked to end before it began", 128 + signal.SIGINT)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for a folder that hangs are left behind.
    os._exit(status)

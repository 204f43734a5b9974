"""A small training program whose faults are told to it in its environment.

FAULTS is a JSON list of {"kind", "at", "rank", "step"}, each of which happens once in a run.
`at` is a place of a step (forward, reduce, gate, before_update, update, after_update), of a
recovery (recovery), a hook or the report; for the last two `step` may be left out. With `after` it
does not happen before the fault of that number has.

With EVENTS, the path of the run's log, rank 0 notes each step there and prints it with WORDS, and
each step takes STEP_S longer. With DEVICE=fake torch's default group sends nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.testing._internal.distributed.fake_pg
from torch import nn

from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.comm.sockets import open_sockets, shut_down
from resilience.inprocess.block import BlockOptions, reexecutable
from resilience.inprocess.event_pipe import open_events
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import read_handles
from resilience.state.digest import digest_state
from resilience.state.report import Report
from resilience.state.torch_state import TorchState, materialise
from resilience.state.transfer_buffer import TransferBuffer

OUT = Path(os.environ["OUT"])
STEPS = int(os.environ.get("STEPS", "6"))
FAULTS = json.loads(os.environ.get("FAULTS", "[]"))

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
materialise(optimizer)
torn = False
current: list[Generation] = []


class FatalError(Exception):
    """Would come again."""


class EndedEarly(Exception):  # noqa: N818 - it is none
    """The block returns before its last step, as of a rank that has run out of data."""


def reach(at: str, step: int | None = None) -> None:
    """Have what is to happen here happen."""
    rank = current[-1].rank if current else -1
    for number, fault in enumerate(FAULTS):
        is_here = fault["at"] == at and fault["rank"] == rank
        is_due = "after" not in fault or (OUT / f"fault-{fault['after']}").exists()
        if is_here and is_due and fault.get("step", step) == step and claim(number, fault):
            KINDS[fault["kind"]]()


def claim(number: int, fault: dict[str, object]) -> bool:
    """Take the fault: it happens once, unless it is to happen again and again.

    The file is the record of it as well: at the next moment another thread may end the process.
    """
    if fault.get("always"):
        return True
    try:
        (OUT / f"fault-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fail() -> None:
    raise ValueError("a planned fault")


def fail_fatally() -> None:
    raise FatalError("cannot be mended")


def end_early() -> None:
    raise EndedEarly


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_zygote() -> None:
    """Kill the process that has forked this one for the agent."""
    agent = handles.agent_pid
    zygote, *_ = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    os.kill(int(zygote), signal.SIGKILL)


def kill_with_lock() -> None:
    lock = threading.Lock()
    with lock, current[-1].lock:
        kill()


def kill_with_child() -> None:
    # It outlives its parent unless somebody ends it.
    subprocess.Popen(["sleep", "1000"])
    kill()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def outlive_agent() -> None:
    """Live on when the agent dies, as a process does that waits in the kernel for a disk."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, 0, 0, 0, 0)
    tell_test()
    stop()


def hold_interpreter() -> None:
    ctypes.PyDLL(None).pause()


def sleep() -> None:
    """Get nowhere, as a rank does that waits for what never comes: this is the fault itself."""
    time.sleep(1000)


def read_nothing() -> None:
    os.read(os.pipe()[0], 1)


def read_nothing_elsewhere() -> None:
    thread = threading.Thread(target=read_nothing)
    thread.start()
    thread.join()


def drop_store() -> None:
    """Shut down the connections to the store's port."""
    port = int(current[-1].store_address.rpartition(":")[2])
    for each in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(each.descriptor)) as borrowed:
            if borrowed.getpeername()[1] == port:
                shut_down([each])


def leave() -> None:
    sys.exit(3)


def tell_test() -> None:
    """Tell the test that this place is reached, and by which process."""
    with Path(os.environ["NOTE"]).open("w") as note:
        note.write(f"{os.getpid()}\n")


def wait_for_test() -> None:
    """Tell the test that this place is reached, and go no further."""
    tell_test()
    sleep()


def wait_to_go_on() -> None:
    """Tell the test that this place is reached, and wait until it lets the run go on."""
    tell_test()
    Path(os.environ["GO_ON"]).read_text()


def break_logs() -> None:
    """Put a file in the place of the folder with the node's logs, and have it noticed."""
    logs = OUT.parent / "run" / "logs" / handles.node
    logs.rename(OUT / "logs")
    logs.write_text("")
    sys.stderr.write("one more line\n")


KINDS = {
    "raise": fail, "fatal": fail_fatally, "end_early": end_early, "kill": kill,
    "kill_zygote": kill_zygote, "kill_with_lock": kill_with_lock,
    "kill_with_child": kill_with_child, "stop": stop, "outlive": outlive_agent,
    "gil": hold_interpreter, "sleep": sleep, "pipe": read_nothing, "thread": read_nothing_elsewhere,
    "drop_store": drop_store, "exit": leave, "wait": wait_for_test, "tell": tell_test,
    "wait_to_go_on": wait_to_go_on, "break_logs": break_logs,
}  # fmt: skip


def apply(step: int) -> None:
    optimizer.step()
    reach("update", step)
    optimizer.zero_grad()


def samples(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)


reach("import")
handles = read_handles(os.environ)
assert handles
rec = Recovery(
    apply=apply,
    transfer_buffer=(
        TransferBuffer(handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes)
        if handles.recovers
        else None
    ),
    reach=reach,
)
view = TorchState(model, optimizer)
rec.bind(view)
log = (
    open_events(Path(os.environ["EVENTS"]), node=handles.node, rank=None, generation=-1)
    if "EVENTS" in os.environ
    else None
)
is_asked: list[int] = []


def end_together(generation: Generation) -> None:
    """End all ranks after the same step once one was asked to."""
    flag = torch.tensor([float(bool(is_asked))])
    generation.group.allreduce([flag]).wait()
    if flag.item():
        sys.exit(143)


def block(generation: Generation) -> str:
    # Only from here on: a rank that rolls forward needs the gradients that it has.
    resumed = rec.resume(generation, lambda fallback: 0)
    optimizer.zero_grad()
    (OUT / "resumed.jsonl").open("a").write(
        json.dumps([generation.number, generation.rank, resumed.role, resumed.step]) + "\n"
    )
    for step in range(resumed.step, STEPS):
        generation.mark(Activity.FORWARD, step)
        try:
            reach("forward", step)
        except EndedEarly:
            return ""
        rec.begin()
        inputs, targets = samples(step, generation.rank)
        nn.functional.mse_loss(model(inputs), targets).backward()
        reach("reduce", step)
        for parameter in model.parameters():
            generation.group.allreduce([parameter.grad]).wait()
            parameter.grad /= generation.world_size
        if os.environ.get("ORDERLY"):
            end_together(generation)
        with rec.commit(generation):
            apply(step)
        if log and generation.rank == 0:
            log.write("step", step=step)
            sys.stdout.write(f"step {step} {os.environ.get('WORDS', '')}\n")
            sys.stdout.flush()
            time.sleep(float(os.environ["STEP_S"]))
    return digest_state(view)


def enter(generation: Generation) -> None:
    current.append(generation)
    rec.enter(generation)
    reach("enter")
    if log:
        log.enter(generation.number, rank=generation.rank)


def report(*, rank: int, node: str, generation: int) -> Report:
    reach("report")
    return rec.report(rank=rank, node=node, generation=generation)


def main() -> None:
    if os.environ.get("ORDERLY"):
        signal.signal(signal.SIGTERM, lambda number, frame: is_asked.append(number))
    if os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    digest = reexecutable(
        block,
        report=report,
        on_fault=lambda error: reach("on_fault"),
        options=BlockOptions(
            device_type=os.environ.get("DEVICE", "cpu"),
            fatal=(FatalError,),
            is_all=bool(os.environ.get("IS_ALL")),
        ),
        enter=enter,
    )()
    (OUT / f"digest-{current[-1].rank}").write_text(digest)
    reach("after_end")


main()

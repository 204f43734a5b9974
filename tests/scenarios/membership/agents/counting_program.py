"""A program whose ranks count in integers and note what they do, until a file asks them to end.

Each rank holds one shard: a few integers, which each step makes anew from the last ones and from
what all ranks add. So each step has known values, see `counting`. The notes in OUT, see `history`:

enter   a generation begins for this process: who its members are
resume  it has the state of a step, and how it came by it
pass    it has passed the gate of a step, with the digest of the state before the step
end     its block has returned
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilience.checkpointless.plan import Fallback
from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.inprocess.block import BlockOptions, reexecutable
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import read_handles
from resilience.state.transfer_buffer import TransferBuffer
from resilience.state.view import NamedTensor
from tests.scenarios.membership.agents.counting import FACTOR, NUM_VALUES, digest, first, share

OUT = Path(os.environ["OUT"])
STEP_S = float(os.environ["STEP_S"])
torch.set_num_threads(1)
log = os.open(OUT / "ranks.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
handles = read_handles(os.environ)
assert handles


class Shard:
    """The state of this rank; a StateView."""

    replica, shard = 0, ""

    def __init__(self) -> None:
        self.values = torch.zeros(NUM_VALUES, dtype=torch.int64)

    def tensors(self) -> list[NamedTensor]:
        return [NamedTensor(name="values", tensor=self.values)]

    def read_rest(self) -> dict[str, Any]:
        return {}

    def write_rest(self, rest: object) -> None:
        assert rest == {}


state = Shard()
added = torch.zeros(NUM_VALUES + 1, dtype=torch.int64)
"""What all ranks add, and how many of them have been asked to end."""


def note(what: str, generation: Generation, **fields: Any) -> None:
    words = {
        "what": what,
        "generation": generation.number,
        "rank": generation.rank,
        "node": generation.node,
        "pid": os.getpid(),
        "at_s": time.monotonic(),
        **fields,
    }
    os.write(log, json.dumps(words).encode() + b"\n")


def apply(step: int) -> None:
    state.values.mul_(FACTOR).add_(added[:-1])


def start(fallback: Fallback) -> int:
    state.values.copy_(torch.tensor(first(state.shard)))
    return 0


def block(generation: Generation) -> None:
    seat = generation.layout.seat(generation.rank)
    state.replica, state.shard = seat.replica, seat.shard
    recovery.bind(state)
    resumed = recovery.resume(generation, start)
    note("resume", generation, step=resumed.step, role=resumed.role, reason=resumed.reason)
    step, num_asked = resumed.step, 0
    while not num_asked:
        generation.mark(Activity.FORWARD, step)
        recovery.begin()
        time.sleep(STEP_S)
        added[:-1] = torch.tensor(share(step, generation.rank))
        added[-1] = (OUT / "finish").exists()
        shared = added.clone()
        dist.all_reduce(shared, group=generation.group)
        added.copy_(shared)
        begun_s = time.monotonic()
        with recovery.commit(generation):
            values = state.values.tolist()
            note("pass", generation, step=step, begun_s=begun_s, digest=digest(values))
            apply(step)
        step, num_asked = step + 1, int(added[-1])
    note("end", generation, step=step, digest=digest(state.values.tolist()))


def enter(generation: Generation) -> None:
    recovery.enter(generation)
    note("enter", generation, nodes=generation.layout.nodes, starts=generation.layout.starts)


recovery = Recovery(
    apply=apply,
    transfer_buffer=TransferBuffer(
        handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
    ),
)
reexecutable(block, report=recovery.report, options=BlockOptions(is_all=True), enter=enter)()

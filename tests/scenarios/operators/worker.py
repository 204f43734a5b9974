"""A worker that does under any agent what a script says, and notes what becomes of it.

ORDERS is a JSON list of one list for each start of the run, which has one order for each local
rank: `end`, `exit N`, `kill`, `wait` for a signal, `save` at one and end well, `ignore` all,
`log N`: print N steps and stand still, or end where all are printed; or `tell N`, which tells them
to AWS's agent as well.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "JOB_RESTART_COUNT"),
]
STEPS = int(os.environ["STEPS"])
STEP_S = float(os.environ["STEP_S"])
OUT = Path(os.environ["OUT"])
NODE = os.environ["NODE"]
IN_PROCESS = "IN_PROCESS" in os.environ
rank = int(os.environ["LOCAL_RANK"])
ORDERS = json.loads(os.environ["ORDERS"])
given = ["wait"]


class GoneAgain(Exception):  # noqa: N818 - it is none
    """The run has stopped, and this process waits for its next start."""


def note(**fields: Any) -> None:
    with (OUT / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"node": NODE, "local_rank": rank, **fields}) + "\n")


def wait_for_others(count: int) -> None:
    """Return when the node's other workers are there as well, for some seconds."""
    (OUT / f"up-{NODE}-{count}-{rank}").touch()
    end_s, number = time.monotonic() + 20, int(os.environ["LOCAL_WORLD_SIZE"])
    while len([*OUT.glob(f"up-{NODE}-{count}-*")]) < number and time.monotonic() < end_s:
        time.sleep(0.01)


def claim_start() -> int:
    """Return how often this worker was started before."""
    for count in range(100):
        with suppress(FileExistsError):
            (OUT / f"start-{NODE}-{rank}-{count}").touch(exist_ok=False)
            return count
    raise RuntimeError("started too often")


class Line:
    """The socket of AWS's agent: frames of a length and JSON, none of which is answered here."""

    def __init__(self) -> None:
        self.client = str(uuid.uuid4())
        self.socket = socket.socket(socket.AF_UNIX)
        path = os.environ.get("HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH")
        self.is_there = path is not None
        if path is not None:
            self.socket.connect(path)
            self.file = self.socket.makefile("rb")
            self.send("init")

    def send(self, kind: str, **fields: Any) -> None:
        if self.is_there:
            message = {"type": kind, "client_id": self.client, "local_rank": rank, **fields}
            data = json.dumps(message).encode()
            self.socket.sendall(struct.pack(">I", len(data)) + data)

    def wait_for(self, kind: str) -> dict[str, Any]:
        while True:
            message = json.loads(self.file.read(struct.unpack(">I", self.file.read(4))[0]))
            if message["type"] == kind:
                return dict(message)


def take_steps(line: Line, number: int, *, tells: bool) -> None:
    line.is_there &= tells
    kinds = {"model_checkpoint": 1, "data_checkpoint": 0}
    if rank == 0:
        line.send("ckpt_init", prefix="run", checkpoint_types=kinds)
    for step in range(number):
        sys.stdout.write(f"step {step} loss: 2.5\n")
        sys.stdout.flush()
        line.send("job_data", rank=int(os.environ["RANK"]), data=json.dumps({"step": step}))
        if rank == 0:
            kind = "model_checkpoint"
            line.send("ckpt_info_update", step=step, path="state", checkpoint_type=kind)
        time.sleep(STEP_S)


def stand_still(line: Line, *, ends: bool) -> None:
    """Wait for a signal; in the mode of AWS's agent whose workers stay, for the word of a fault."""
    if IN_PROCESS and not ends:
        line.wait_for("job_fault")
        raise GoneAgain
    while True:
        signal.pause()


def obey(order: str, line: Line) -> int:
    word, _, number = order.partition(" ")
    if word in ("log", "tell"):
        take_steps(line, int(number), tells=word == "tell")
        if int(number) >= STEPS:
            return 0
    if word in ("wait", "save", "ignore", "log", "tell"):
        stand_still(line, ends=word == "ignore")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(number) if word == "exit" else 0


def take_part(line: Line) -> int:
    """Take part in one start of the run."""
    count = claim_start()
    order = given[0] = ORDERS[count][rank] if count < len(ORDERS) else "wait"
    environment = {name: os.environ.get(name) for name in NAMES}
    if IN_PROCESS:
        line.send("at_rcb_barrier")
        environment |= line.wait_for("job_start")["worker_envs"]
        line.send("past_rcb_barrier")
    note(up=os.getpid(), **{name: environment[name] for name in NAMES})
    wait_for_others(count)
    return obey(order, line)


def take(number: int, frame: object) -> None:
    note(signal=signal.Signals(number).name)
    if given[0] != "ignore":
        # At once: the order may be a wait.
        os._exit(0 if given[0] == "save" else 128 + number)


for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, take)
connection = Line()
while True:
    with suppress(GoneAgain):
        sys.exit(take_part(connection))

"""A program as torchrun starts it: it reads its rank, and knows of no block.

FAULTS is a JSON list of {"kind", "rank", "count"}: what becomes of a rank in which start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

OUT = Path(os.environ["OUT"])
FAULTS = json.loads(os.environ.get("FAULTS", "[]"))
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kinds = [each["kind"] for each in FAULTS if (each["rank"], each["count"]) == (rank, count)]


def wait_for_test() -> None:
    """Tell the test that this place is reached, and go no further."""
    with Path(os.environ["NOTE"]).open("w") as note:
        note.write(f"{os.getpid()}\n")
    signal.pause()


if "stubborn" in kinds:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
key = store.get(f"who/{rank}") if store.check([f"who/{rank}"]) else b"nobody"
store.set(f"who/{rank}", str(os.getpid()))
(OUT / f"start-{count}-{rank}").write_text(
    f"{key.decode()} {os.environ['MASTER_PORT']} {os.getpid()}"
)
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
if "idle" in kinds:
    store.set(f"idle/{count}", "")
    signal.pause()
if any((each["kind"], each["count"]) == ("idle", count) for each in FAULTS):
    store.wait([f"idle/{count}"])
if "follows" in kinds:
    store.set("ending", str(os.getpid()))
    raise RuntimeError("[x/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
if "cause" in kinds:
    # Nothing tells that the agent has buried it but that there is no such process any more.
    ending, end_s = Path("/proc") / store.get("ending").decode(), time.monotonic() + 30
    while ending.exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if "end" in kinds:
    sys.exit(0)
if "asked" in kinds:
    sys.exit(143)
if "raise" in kinds:
    raise ValueError("a planned fault")
if "wait" in kinds:
    wait_for_test()
if "stubborn" in kinds:
    signal.pause()
if count < int(os.environ.get("NUM_DEATHS", "0")) and rank == count % 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
(OUT / f"digest-{rank}").write_text(str(total.item()))

"""A program as torchrun starts it: it reads its rank, and knows of no block."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

OUT = Path(os.environ["OUT"])
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ.get("FAIL") == "always":
    sys.exit(5)
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
key = store.get(f"who/{rank}") if store.check([f"who/{rank}"]) else b"nobody"
store.set(f"who/{rank}", str(os.getpid()))
(OUT / f"start-{count}-{rank}").write_text(f"{key.decode()} {os.environ['MASTER_PORT']}")
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
if count < int(os.environ.get("NUM_DEATHS", "0")) and rank == count % 2:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
(OUT / f"digest-{rank}").write_text(str(total.item()))

"""A program with a block, started by an agent that does not recover."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from resilience.inprocess.handles import read_handles
from resilience.inprocess.once import await_generation, open_coordinator

is_early = "RANK" not in os.environ
handles = read_handles(os.environ)
assert handles is not None
assert not handles.recovers
assert (handles.transfer_file, handles.state_files) == (-1, ())
generation = await_generation(open_coordinator(handles))
host, _, port = generation.store_address.rpartition(":")
store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
dist.init_process_group(
    "gloo",
    store=PrefixStore(generation.store_prefix, store),
    rank=generation.rank,
    world_size=generation.world_size,
)
dist.barrier()
if generation.number == 0 and generation.rank == 1:
    sys.exit(7)
dist.barrier()
Path(os.environ["OUT"], f"told-{generation.rank}").write_text(
    json.dumps(
        {
            "is_early": is_early,
            "number": generation.number,
            "local_rank": generation.local_rank,
            "node": generation.layout.seat(generation.rank).node,
            "environment": dict(os.environ),
        }
    )
)

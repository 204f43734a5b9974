"""Writes the environment that it was started with, and meets the others as it says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
Path(os.environ["OUT"], f"environment-{os.environ['RANK']}").write_text(
    json.dumps(dict(os.environ))
)

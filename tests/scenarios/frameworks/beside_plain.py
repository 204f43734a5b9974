"""A program of this folder by the plain framework, and by ours, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_plain_and_ours(name: str, folder: Path, **variables: str) -> list[Path]:
    """Run a program on two ranks with the plain Trainer, then with ours; return their folders."""
    found = []
    for kind in ("plain", "ours"):
        out = folder / kind
        out.mkdir()
        own = {**os.environ, **variables, "OUT": str(out), "TMPDIR": "/tmp"}
        own |= {"PLAIN": "1"} if kind == "plain" else {}
        program = str(Path(__file__).parent / f"{name}_program.py")
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
        command = [sys.executable, "-m", *torchrun]
        subprocess.run(command, env=own, check=True, timeout=200, capture_output=True)
        found.append(out)
    return found

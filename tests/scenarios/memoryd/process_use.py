"""What a process takes of the machine, as the kernel counts it."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.resilience.tiered.warm_daemon import WarmDaemon


@dataclass(frozen=True)
class Use:
    """What one process takes at one moment."""

    pss_bytes: int
    """Its memory; what it shares counts in parts."""
    own_bytes: int
    """What of it is no file's: neither a segment nor a library."""
    num_descriptors: int
    """Without those of segments that there are, which the budget bounds."""
    num_threads: int


def read_use(process: subprocess.Popen[str] | WarmDaemon | None) -> Use:
    """Return what a running process takes."""
    assert process is not None
    folder = Path("/proc") / str(process.pid)
    kib = dict(
        re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE)
    )
    targets = []
    for each in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            targets.append(str(each.readlink()))
    return Use(
        pss_bytes=int(kib["Pss"]) << 10,
        own_bytes=int(kib["Pss_Anon"]) << 10,
        num_descriptors=sum(not re.search(r"/segment-\d+$", each) for each in targets),
        num_threads=len(list((folder / "task").iterdir())),
    )

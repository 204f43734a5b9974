"""What this machine has, and whether a local run of a job fits on it.

`read_machine` alone looks at files and variables. A limit that cannot be read is no limit.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.tiered_memory import state_bytes

# A choice, not a measurement: the tiny recipes' 4 to 6 processes fit on one core, a cluster's 128
# on no laptop. Workers wait for each other: the more of them share a core, the slower each step.
PROCESSES_PER_CORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a local run may use: the machine's own, within this process's limits."""

    num_cores: float
    memory_bytes: int
    num_gpus: int


def read_machine(root: Path = Path("/")) -> Machine:
    """Read what this process may use; files are looked for below `root`."""
    # macOS has no affinity, and no files of these names.
    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    memory_bytes = int(total[1]) * 1024 if total else sys.maxsize
    groups = list(_cgroups(root))
    return Machine(
        num_cores=min([num_cpus, *map(_quota_cores, groups)]),
        memory_bytes=min([memory_bytes, *map(_limit_bytes, groups)]),
        num_gpus=_num_gpus(root),
    )


def overload(job: Job, machine: Machine) -> list[str]:
    """Return a line for each thing of which a local run of the job needs more than there is."""
    trainer, has_devices = job.trainer, job.instance.accelerator != "cpu"
    nodes = f"trainer.num_nodes {trainer.num_nodes}"
    devices = f"trainer.num_devices {trainer.num_devices}"
    lines = []
    # A worker takes cuda:LOCAL_RANK, a local run's nodes see the same devices, and NCCL refuses
    # two ranks on one: with fewer than the ranks of all nodes no run begins. Spares hold none.
    if has_devices and machine.num_gpus < (needed := trainer.num_nodes * trainer.num_devices):
        lines.append(
            f"{nodes} x {devices} on instance.type {job.instance.type!r} need "
            f"{_counted(needed, 'GPU')}, and this machine has {machine.num_gpus}"
        )
    num_workers = job.num_nodes_started * trainer.workers_per_node
    num_spares = job.num_nodes_started * job.resilience.spares_per_node
    if num_workers + num_spares > (num_max := machine.num_cores * PROCESSES_PER_CORE):
        standby = job.resilience.standby_nodes
        started = f"({nodes} + resilience.checkpointless.standby_nodes {standby})"
        spares = f", and {_counted(num_spares, 'spare')}," if num_spares else ""
        lines.append(
            f"{started if standby else nodes} x {devices} = {_counted(num_workers, 'worker')}"
            f"{spares} are more than {PROCESSES_PER_CORE} for each of this machine's "
            f"{_counted(machine.num_cores, 'core')} = {round(num_max, 2):g}"
        )
    # Weights and moments only: gradients, activations and the processes themselves take more.
    if not has_devices and (training := job.training):
        num_copies = training.trainer.replicas
        needed_bytes = state_bytes(training) * num_copies
        if needed_bytes > machine.memory_bytes:
            lines.append(
                f"{nodes} x {devices} hold the model's training state {num_copies} times, "
                f"{-(-needed_bytes >> 20)} MiB, and this machine has "
                f"{machine.memory_bytes >> 20} MiB"
            )
    return lines


def check_machine(job: Job, machine: Machine) -> None:
    """Raise RecipeError where a local run of the job would overload the machine."""
    if lines := overload(job, machine):
        text = "\n  ".join(["action 'run': this machine cannot hold the job:", *lines])
        remedy = "use a smaller recipe, action=submit with a cluster, or oversubscribe=true"
        raise RecipeError(f"{text}\n{remedy} to start it anyway")


def _counted(number: float, noun: str) -> str:
    return f"{round(number, 2):g} {noun}{'' if number == 1 else 's'}"


def _num_gpus(root: Path) -> int:
    files = (root / "dev").glob("nvidia[0-9]*")
    num_present = sum(path.name.removeprefix("nvidia").isdecimal() for path in files)
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return num_present
    return min(num_present, sum(each.strip() not in {"", "-1"} for each in listed.split(",")))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders that may limit this process: its own groups and all above them."""
    # "0::/path" in version 2; "4:cpu,cpuacct:/path" in version 1, which mounts each controller.
    # A container may be told a path that only the host has; the mount's root is then its group.
    lines = _text(root / "proc/self/cgroup")
    for controllers, path in re.findall(r"^\d+:([^:]*):(/.*)$", lines, re.MULTILINE):
        for mount in controllers.split(","):
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                yield root / "sys/fs/cgroup" / mount / group.relative_to("/")


def _quota_cores(cgroup: Path) -> float:
    version_1 = f"{_text(cgroup / 'cpu.cfs_quota_us')} {_text(cgroup / 'cpu.cfs_period_us')}"
    found = re.fullmatch(r"([1-9]\d*)\s+([1-9]\d*)\s*", _text(cgroup / "cpu.max") or version_1)
    return int(found[1]) / int(found[2]) if found else math.inf


def _limit_bytes(cgroup: Path) -> int:
    limit = (_text(cgroup / "memory.max") or _text(cgroup / "memory.limit_in_bytes")).strip()
    return int(limit) if limit.isdecimal() else sys.maxsize


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return ""

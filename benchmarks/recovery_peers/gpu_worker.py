"""One rank of the benchmarked job on a device that all ranks share; run by `benchmarks.gpu`.

gloo takes tensors of a device, too, where NCCL refuses two ranks on one. On a CPU the program is
the same, but for what a CPU has not: errors that end a context.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benchmarks.jobplan import Kind
from benchmarks.recovery_peers.ours_worker import LOG, Training, run
from recipes_training.group import choose_fixed_order
from resilience.errors import DeviceLostError
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import read_handles
from resilience.state.report import Report

DEVICE_VARIABLE = "GPU_BENCHMARK_DEVICE"
FLAGS_VARIABLE = "GPU_BENCHMARK_FLAGS"
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_FAR = 1 << 40
"""Bytes behind a tensor where no memory of the device is mapped."""


class DeviceTraining(Training):
    """A rank with its state on a device."""

    is_lost = False
    """On a CPU, after what would have ended a context on a GPU."""

    def block(self, generation: Generation) -> None:
        """Note which device files are open, then train."""
        handles = read_handles(os.environ)
        assert handles is not None
        LOG.write(
            "opened",
            generation.rank,
            own=device_files(os.getpid()),
            zygote=device_files(find_zygote(handles.agent_pid)),
        )
        super().block(generation)

    def strike(self, kind: Kind, words: str) -> None:
        """Have a kernel fail, whose error comes with a later call; or another fault."""
        if kind not in ("assert", "address"):
            super().strike(kind, words)
            return
        self.is_lost = self.device.type == "cpu"
        (fail_assertion if kind == "assert" else touch_no_memory)(self.device)

    def report(self, *, rank: int, node: str, generation: int) -> Report:
        """Return what this rank holds, if it can be read."""
        if self.is_lost:
            raise DeviceLostError("a stand-in on a CPU for a context that has ended")
        return super().report(rank=rank, node=node, generation=generation)


def fail_assertion(device: torch.device) -> None:
    """Index behind the end: an assertion of the kernel on a GPU, an IndexError on a CPU."""
    torch.zeros(1, device=device)[torch.tensor([7], device=device)]


def touch_no_memory(device: torch.device) -> None:
    """Have a kernel write where no memory is; on a GPU alone."""
    memory = torch.zeros(1, dtype=torch.uint8, device=device)

    class Lie:
        __cuda_array_interface__ = {  # noqa: RUF012 - a protocol's attribute
            "shape": (_FAR,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }

    torch.as_tensor(Lie(), device=device)[-1:].add_(1)


def device_files(pid: int) -> list[str]:
    """Return the files of NVIDIA's driver that a process has open: those of a context."""
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(each.readlink()))
        except FileNotFoundError:
            continue
    return sorted(name for name in found if name.startswith("/dev/nvidia"))


def find_zygote(agent: int) -> int:
    """Return the process that forks the agent's workers; the agent has started it before them."""
    first = int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])
    assert b"resilience.agent.processes.zygote" in Path(f"/proc/{first}/cmdline").read_bytes()
    return first


def choose_flags(name: str) -> None:
    """Set what makes sums have one order: none, cublas, lenient or product."""
    os.environ.pop(CUBLAS, None)
    if name == "cublas":
        os.environ[CUBLAS] = ":4096:8"
    elif name != "none":
        choose_fixed_order()
        torch.use_deterministic_algorithms(mode=True, warn_only=name == "lenient")


if __name__ == "__main__":
    choose_flags(os.environ[FLAGS_VARIABLE])
    run(DeviceTraining(os.environ[DEVICE_VARIABLE]))
    sys.stdout.flush()

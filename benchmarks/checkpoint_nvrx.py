"""NVRx's local checkpoints: files in /dev/shm, each rank's copied to another rank over gloo.

    python -m benchmarks.checkpoint_nvrx PLAN

Runs in the environment of benchmarks/install-peers.sh. The package is made for CUDA, so
that this gives it what it needs without: a state of tensors on the host, and calls of CUDA
that do nothing. Its asynchronous mode does not work on the host: all of a save blocks.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)

from benchmarks.checkpoint_state import (
    Figures,
    Plan,
    Ranks,
    Timed,
    change,
    check_equal,
    clear,
    copy_into,
    make_room,
    make_state,
    read_plan,
    run_laps,
    run_ranks,
)

JUMP = REPLICAS = 2
"""A rank's copy is with the rank that is so many further: on another node of two ranks."""


class HostState(BasicTensorAwareStateDict):  # type: ignore[misc]
    """A state whose tensors are on the host, and stay there."""

    def __init__(self, content: dict[str, torch.Tensor]) -> None:
        self.state_dict, self._is_hollow = content, False

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Leave the tensors where they are."""


def stand_in_for_cuda() -> None:
    """Let what the package asks of a device be done on the host."""
    empty_like = torch.empty_like

    def empty_on_host(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        kept = {name: each for name, each in options.items() if each != "cuda"}
        return empty_like(tensor, **kept)

    torch.cuda.synchronize = lambda *options: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *options, **named: tensor  # type: ignore[assignment,method-assign]
    torch.empty_like = empty_on_host  # type: ignore[assignment]


def run_rank(plan: Plan, rank: int, ranks: Ranks) -> None:
    """Save and restore, lap by lap."""
    stand_in_for_cuda()
    replication = CliqueReplicationStrategy.from_replication_params(
        replication_jump=JUMP, replication_factor=REPLICAS
    )
    folder = plan.folder / f"rank{rank}"
    state = make_state(plan, rank)
    room = make_room(plan, rank)

    def make_manager() -> LocalCheckpointManager:
        return LocalCheckpointManager(str(folder), "bench", replication)

    def load(step: int) -> None:
        manager = make_manager()
        if manager.find_latest() != step:
            raise SystemExit(f"NVRx has found step {manager.latest_iteration}, not {step}")
        copy_into(room, manager.load()[0].state_dict)

    writer = make_manager()

    def lap(step: int, figures: Figures) -> None:
        figures.span("clone", ranks.run(lambda: copy_into(room, state)))
        change(state, step)
        ranks.barrier()
        began_s = time.monotonic()
        writer.save(HostState(dict(state)), step)
        timed = Timed(began_s, time.monotonic())
        figures.slowest("blocked", timed.seconds)
        for name in ("own RAM", "peer RAM"):
            figures.span(name, timed)
        clear(room)
        figures.span("restore, living", ranks.run(lambda: load(step)))
        check_equal(state, room)

    run_laps(plan, rank, lap, ranks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_ranks(read_plan(sys.argv[1]), "ranks", run_rank)

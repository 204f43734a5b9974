"""One rank under this project's node agent: the same job, recovered from replicas in memory.

A library user's program: what it keeps over faults is made first, what belongs to a generation
within the block.
"""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector, strike_process
from benchmarks.jobplan import Kind, read_plan
from benchmarks.recovery_peers import job
from resilience.checkpointless.plan import Fallback
from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.comm.reducer import GradientReducer
from resilience.inprocess.block import reexecutable
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import read_handles
from resilience.state.report import Report
from resilience.state.shared import SharedState
from resilience.state.torch_state import TorchState, materialise
from resilience.state.transfer_buffer import TransferBuffer

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)


class Training:
    """What a rank keeps over generations."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.model, self.optimizer = job.build_model()
        self.model.to(self.device)
        materialise(self.optimizer)
        handles = read_handles(os.environ)
        assert handles is not None
        transfer_buffer = TransferBuffer(
            handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
        )
        transfer_buffer.touch()
        shared = SharedState(handles.state_files)
        shared.prepare()
        # Every rank holds all of the state.
        self.recovery = Recovery(
            apply=lambda step: self.update(),
            transfer_buffer=transfer_buffer,
            shared=shared,
        )
        self.recovery.bind(TorchState(self.model, self.optimizer))
        self.reducer: GradientReducer | None = None

    def update(self) -> None:
        """Write weights and moments."""
        self.optimizer.step()

    def strike(self, kind: Kind, words: str) -> None:
        """Do one fault to this process."""
        strike_process(kind, words)

    def report(self, *, rank: int, node: str, generation: int) -> Report:
        """Return what this rank holds."""
        return self.recovery.report(rank=rank, node=node, generation=generation)

    def start(self, fallback: Fallback) -> int:
        """Begin with what was built, which is the same in every process."""
        assert self.recovery.mark.step == 0, fallback.reason
        return 0

    def block(self, generation: Generation) -> None:
        """Train from the newest committed step to the planned one."""
        rank = generation.rank
        if self.reducer is None:
            self.reducer = GradientReducer(self.model)
        else:
            self.reducer.take_group()
        resumed = self.recovery.resume(generation, self.start)
        first = resumed.step
        self.reducer.clear()
        LOG.write("restored", rank, step=first, role=resumed.role, source=resumed.source)
        injector = FaultInjector(PLAN, LOG, self.strike)
        for step in range(first, PLAN.num_steps):
            batch = job.draw_batch(rank, step, PLAN.num_ranks).to(self.device)
            self.recovery.begin()
            generation.mark(Activity.FORWARD, step)
            with self.reducer.micro_batch(is_last=True):
                loss = job.compute_loss(self.model, batch)
                injector.fire(rank, step)
                generation.mark(Activity.BACKWARD, step)
                loss.backward()
            with self.recovery.commit(generation):
                self.update()
                injector.fire(rank, step, "update")
            self.optimizer.zero_grad(set_to_none=True)
            bits = job.loss_bits(loss.detach())
            LOG.write("committed", rank, step=step, loss=bits, world=generation.world_size)
        LOG.write("finished", rank, digest=job.state_digest(self.model, self.optimizer))


def run(training: Training) -> None:
    """Run this rank until all ranks have finished."""
    recovery = training.recovery
    reexecutable(
        training.block,
        report=training.report,
        enter=recovery.enter,
    )()


if __name__ == "__main__":
    run(Training())
    sys.stdout.flush()

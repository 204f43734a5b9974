"""One rank with a large state, for its memory: with recovery, under the node agent.

Run by `benchmarks.overhead_memory`. As in the trainer, the model gets its memory before the rank
is known and without being filled, and moments are made in the first generation.
"""

from __future__ import annotations

import argparse
import os
import sys

from torch.optim import AdamW

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector
from benchmarks.jobplan import JobPlan, read_plan
from benchmarks.overhead_state import build, draw_batch, fill
from resilience.checkpointless.plan import Fallback
from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.comm.reducer import GradientReducer
from resilience.inprocess.block import reexecutable
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import read_handles
from resilience.state.torch_state import TorchState, materialise
from resilience.state.transfer_buffer import TransferBuffer


class Training:
    """What a rank keeps over generations."""

    def __init__(self, gib: float, plan: JobPlan) -> None:
        self.plan = plan
        self.log = EventLog(plan.run_dir)
        self.injector = FaultInjector(plan, self.log)
        self.model = build(gib)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        handles = read_handles(os.environ)
        assert handles is not None, "the node agent starts this"
        transfer_buffer = TransferBuffer(
            handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
        )
        transfer_buffer.touch()
        self.recovery = Recovery(
            apply=lambda step: self.optimizer.step(),
            transfer_buffer=transfer_buffer,
        )
        self.reducer: GradientReducer | None = None

    def start(self, fallback: Fallback) -> int:
        """Touch all of the state."""
        fill(self.model)
        for moments in self.optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()
        return 0

    def block(self, generation: Generation) -> None:
        """Train from the newest committed step to the planned one."""
        self.log.write("joined", generation.rank)
        if self.reducer is None:
            self.reducer = GradientReducer(self.model)
            materialise(self.optimizer)
            self.recovery.bind(TorchState(self.model, self.optimizer))
        else:
            self.reducer.take_group()
        first = self.recovery.resume(generation, self.start).step
        self.reducer.clear()
        for step in range(first, self.plan.num_steps):
            self.take_step(generation, self.reducer, step)

    def take_step(self, generation: Generation, reducer: GradientReducer, step: int) -> None:
        """Take one step; a fault of the plan comes between forward and backward."""
        rank = generation.rank
        batch = draw_batch(rank, step, self.plan.num_ranks)
        self.recovery.begin()
        generation.mark(Activity.FORWARD, step)
        with reducer.micro_batch(is_last=True):
            loss = self.model(batch).square().mean()
            self.injector.fire(rank, step)
            generation.mark(Activity.BACKWARD, step)
            loss.backward()
        with self.recovery.commit(generation):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        world = generation.world_size
        self.log.write("committed", rank, step=step, loss=loss.item(), world=world)


def main() -> None:
    """Run this rank until all ranks have finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, required=True)
    training = Training(parser.parse_args().gib, read_plan())
    recovery = training.recovery
    reexecutable(
        training.block,
        report=recovery.report,
        enter=recovery.enter,
    )()


if __name__ == "__main__":
    main()
    sys.stdout.flush()

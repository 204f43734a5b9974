"""One rank that takes steps of two copies in turn: one under plain DDP, one under recovery.

Run by `benchmarks.overhead` under the node agent. Each step begins after a barrier. Plain is
what a script without this project does; ours is what `recovery_peers/ours_worker.py` does. All
moments go to steps-RANK.json in the run folder; no judgement is made here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobplan import JobPlan, read_plan
from benchmarks.recovery_peers import job
from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.comm.reducer import GradientReducer
from resilience.inprocess.block import BlockOptions, reexecutable
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import WorkerHandles, read_handles
from resilience.state.torch_state import TorchState, materialise
from resilience.state.transfer_buffer import TransferBuffer

clock = time.monotonic


class Plain:
    """A copy under DDP as it comes."""

    def __init__(self) -> None:
        self.model, self.optimizer = job.build_model()
        self.run = DistributedDataParallel(self.model)

    def step(self, batch: Tensor) -> tuple[list[float], float]:
        """Take a step; return its moments and the loss."""
        stamps = [clock()]
        loss = job.compute_loss(self.run, batch)
        stamps.append(clock())
        loss.backward()
        stamps.append(clock())
        self.optimizer.step()
        stamps.append(clock())
        self.optimizer.zero_grad(set_to_none=True)
        stamps.append(clock())
        value = loss.item()
        stamps.append(clock())
        return stamps, value


class Ours:
    """A copy under recovery, without a fault; made before the rank is known."""

    def __init__(self, handles: WorkerHandles) -> None:
        self.model, self.optimizer = job.build_model()
        materialise(self.optimizer)
        transfer_buffer = TransferBuffer(
            handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
        )
        transfer_buffer.touch()
        self.recovery = Recovery(
            apply=lambda step: self.optimizer.step(),
            transfer_buffer=transfer_buffer,
        )
        self.recovery.bind(TorchState(self.model, self.optimizer))

    def join(self, generation: Generation) -> None:
        """Take what belongs to the generation; there is one only."""
        self.generation = generation
        self.reducer = GradientReducer(self.model)
        self.recovery.resume(generation, lambda fallback: 0)
        self.reducer.clear()

    def step(self, batch: Tensor) -> tuple[list[float], float]:
        """Take a step; return its moments and the loss."""
        recovery, generation, step = self.recovery, self.generation, self.recovery.mark.step
        stamps = [clock()]
        recovery.begin()
        generation.mark(Activity.FORWARD, step)
        stamps.append(clock())
        with self.reducer.micro_batch(is_last=True):
            loss = job.compute_loss(self.model, batch)
            stamps.append(clock())
            generation.mark(Activity.BACKWARD, step)
            loss.backward()
            stamps.append(clock())
        stamps.append(clock())
        with recovery.commit(generation):
            stamps.append(clock())
            self.optimizer.step()
            stamps.append(clock())
        stamps.append(clock())
        self.optimizer.zero_grad(set_to_none=True)
        stamps.append(clock())
        value = loss.item()
        stamps.append(clock())
        return stamps, value


class Contest:
    """Both copies on one rank."""

    def __init__(self, options: argparse.Namespace, plan: JobPlan) -> None:
        handles = read_handles(os.environ)
        assert handles is not None, "the node agent starts this"
        self.options = options
        self.plan = plan
        self.handles = handles
        self.ours = Ours(handles)

    def block(self, generation: Generation) -> None:
        """Take all steps and write what they showed."""
        rank = generation.rank
        self.ours.join(generation)
        plain = Plain()
        # Every rank takes the same turns.
        turns = random.Random(job.SEED)
        notes: dict[str, Any] = {"plain": [], "ours": [], "plain_cpu_s": [], "ours_cpu_s": []}
        losses = []
        order = ["plain", "ours"]
        background: list[float] = []
        for pair in range(-self.options.warm_up, self.options.pairs):
            if pair == 0:
                background = self.read_background(rank)
                began_s = clock()
            order.reverse()
            if pair % 2 == 0:
                turns.shuffle(order)
            batch = job.draw_batch(rank, pair + self.options.warm_up, self.plan.num_ranks)
            values = {}
            for name in order:
                copy = self.ours if name == "ours" else plain
                dist.barrier()
                cpu_s = time.process_time()
                stamps, values[name] = copy.step(batch)
                if pair >= 0:
                    notes[f"{name}_cpu_s"].append(time.process_time() - cpu_s)
                    notes[name].append(stamps)
            losses.append(values)
        notes["background_cpu_s"] = [
            after - before
            for before, after in zip(background, self.read_background(rank), strict=True)
        ]
        notes["wall_s"] = clock() - began_s
        # Later on, rounding of other orders of sums grows.
        early = losses[: self.options.warm_up]
        notes["loss_difference"] = max(abs(each["plain"] - each["ours"]) for each in early)
        text = json.dumps({"rank": rank, **notes})
        Path(self.plan.run_dir, f"steps-{rank}.json").write_text(text, "utf-8")

    def read_background(self, rank: int) -> list[float]:
        """Return CPU seconds so far of this rank's link to its agent.

        Rank 0 adds the agent, what forks workers, and the spares.
        """
        link = [each for each in threading.enumerate() if each.name == "agent-link"]
        seconds = [sum(read_cpu_s(Path("/proc/self/task", str(each.native_id))) for each in link)]
        pids: list[int] = [0] * self.plan.num_ranks
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            agent = self.handles.agent_pid
            zygote, *others = find_children(agent)
            spares = [pid for pid in others if pid not in pids]
            seconds += [
                sum(read_process_cpu_s(pid) for pid in group)
                for group in ([agent], [zygote], spares)
            ]
        return seconds


def read_cpu_s(task: Path) -> float:
    """Return the CPU seconds of one thread, to the nanosecond."""
    return int((task / "schedstat").read_text("ascii").split()[0]) / 1e9


def read_process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's threads."""
    return sum(read_cpu_s(task) for task in Path("/proc", str(pid), "task").iterdir())


def find_children(parent: int) -> list[int]:
    """Return the children of a process's first thread, the oldest first."""
    path = Path("/proc", str(parent), "task", str(parent), "children")
    return [int(word) for word in path.read_text("ascii").split()]


def main() -> None:
    """Run this rank until all ranks have finished."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    options = parser.parse_args()
    contest = Contest(options, read_plan())
    recovery = contest.ours.recovery
    reexecutable(
        contest.block,
        report=recovery.report,
        enter=recovery.enter,
        options=BlockOptions(fatal=(Exception,)),
    )()


if __name__ == "__main__":
    main()
    sys.stdout.flush()

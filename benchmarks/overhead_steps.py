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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

WIDTH, DEPTH, ROWS = 1536, 8, 64
NUM_OVERLAP_STEPS = 10
clock = time.monotonic


class Work(Protocol):
    """What is trained."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the same model, and an optimizer, at each call and on each rank."""

    def draw(self, rank: int, step: int, num_ranks: int) -> Tensor:
        """Return a rank's batch."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Run the forward pass."""


class Tiny(Work):
    """The job of the recovery benchmarks."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build it."""
        return job.build_model()

    def draw(self, rank: int, step: int, num_ranks: int) -> Tensor:
        """Draw its micro batch."""
        return job.draw_batch(rank, step, num_ranks)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Compute the model's own loss."""
        return job.compute_loss(model, batch)


class Wide(Work):
    """Square layers of 9 MiB each, so that gradients fill several buckets."""

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build layers with an activation each."""
        torch.set_num_threads(1)
        torch.manual_seed(job.SEED)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        model = nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def draw(self, rank: int, step: int, num_ranks: int) -> Tensor:
        """Draw noise."""
        draw = torch.Generator().manual_seed(step * num_ranks + rank)
        return torch.randn(ROWS, WIDTH, generator=draw)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Let the model learn to give back what it got."""
        loss: Tensor = (model(batch) - batch).square().mean()
        return loss


WORKS: dict[str, Callable[[], Work]] = {"tiny": Tiny, "wide": Wide}


class Plain:
    """A copy under DDP as it comes, or with gradients in its buckets as the trainer has it."""

    def __init__(self, work: Work, *, is_bucket_view: bool) -> None:
        self.work = work
        self.model, self.optimizer = work.build()
        self.run = DistributedDataParallel(self.model, gradient_as_bucket_view=is_bucket_view)
        self.sent: list[float] = []

    def step(self, batch: Tensor) -> tuple[list[float], float]:
        """Take a step; return its moments and the loss."""
        stamps = [clock()]
        loss = self.work.loss(self.run, batch)
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

    def show_sends(self) -> None:
        """From now on, note when buckets leave: DDP's own reduction, seen from Python."""

        # DDP refuses annotations that are text.
        def reduce(_, bucket):  # type: ignore[no-untyped-def]
            self.sent.append(clock())
            buffer = bucket.buffer().div_(dist.get_world_size())
            work = dist.all_reduce(buffer, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        self.run.register_comm_hook(None, reduce)


class NotingReducer(GradientReducer):
    """Notes when each bucket leaves, and how many have ended when backward has."""

    sent: list[float]
    num_done = 0

    def _send(self, bucket: Any) -> None:
        self.sent.append(clock())
        super()._send(bucket)

    def _finish(self) -> None:
        works = [bucket.work for bucket in self._buckets]
        self.num_done = sum(work is not None and work.is_completed() for work in works)
        super()._finish()


class Ours:
    """A copy under recovery, without a fault; made before the rank is known."""

    def __init__(self, work: Work, handles: WorkerHandles) -> None:
        self.work = work
        self.model, self.optimizer = work.build()
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
        self.reducer = NotingReducer(self.model)
        self.reducer.sent = []
        self.recovery.resume(generation, lambda fallback: 0)
        self.reducer.clear()

    def step(self, batch: Tensor) -> tuple[list[float], float]:
        """Take a step; return its moments and the loss."""
        recovery, generation, step = self.recovery, self.generation, self.recovery.mark.step
        self.reducer.sent = []
        stamps = [clock()]
        recovery.begin()
        generation.mark(Activity.FORWARD, step)
        stamps.append(clock())
        with self.reducer.micro_batch(is_last=True):
            loss = self.work.loss(self.model, batch)
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

    def __init__(self, work: Work, options: argparse.Namespace, plan: JobPlan) -> None:
        handles = read_handles(os.environ)
        assert handles is not None, "the node agent starts this"
        self.work = work
        self.options = options
        self.plan = plan
        self.handles = handles
        self.ours = Ours(work, handles)

    def block(self, generation: Generation) -> None:
        """Take all steps and write what they showed."""
        rank = generation.rank
        self.ours.join(generation)
        plain = Plain(self.work, is_bucket_view=self.options.bucket_view)
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
            batch = self.work.draw(rank, pair + self.options.warm_up, self.plan.num_ranks)
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
        notes |= self.watch_overlap(plain, rank)
        text = json.dumps({"rank": rank, **notes})
        Path(self.plan.run_dir, f"steps-{rank}.json").write_text(text, "utf-8")

    def watch_overlap(self, plain: Plain, rank: int) -> dict[str, Any]:
        """Take some more steps and note when buckets leave."""
        plain.show_sends()
        rows: dict[str, list[dict[str, Any]]] = {"plain_overlap": [], "ours_overlap": []}
        for number in range(NUM_OVERLAP_STEPS):
            batch = self.work.draw(rank, number, self.plan.num_ranks)
            plain.sent = []
            dist.barrier()
            begin_s = plain.step(batch)[0][1]
            # DDP's backward ends with its reductions; gradients are in when the last bucket goes.
            sent = [each - begin_s for each in plain.sent]
            rows["plain_overlap"].append({"backward_s": sent[-1], "sent_s": sent})
            dist.barrier()
            stamps = self.ours.step(batch)[0]
            row = {
                "backward_s": stamps[3] - stamps[2],
                "sent_s": [each - stamps[2] for each in self.ours.reducer.sent],
                "num_done": self.ours.reducer.num_done,
            }
            rows["ours_overlap"].append(row)
        return rows

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
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--bucket-view", action="store_true")
    options = parser.parse_args()
    contest = Contest(WORKS[options.work](), options, read_plan())
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

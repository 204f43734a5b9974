"""One rank under an elastic torchrun: DDP at the size that there is, checkpoints as the plan says.

After a change of size torchrun ends all ranks and starts them again at the new one; they load the
newest checkpoint. A global batch has the same samples at any size, as far as it divides.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

from benchmarks.events import EventLog
from benchmarks.jobplan import read_plan

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOG.write("started", RANK)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.recovery_peers import job  # noqa: E402
from benchmarks.recovery_peers.newest_checkpoint import NewestCheckpoint  # noqa: E402
from benchmarks.recovery_peers.small_model import SmallModel  # noqa: E402

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 272,
}
"""The model of llama3_tiny_elastic."""
SMALL_SEQUENCE = 32
NUM_BATCHES = PLAN.num_micro_batches


def build_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build the plan's model and its optimizer, with the same first weights in every process."""
    if PLAN.model != "small":
        return job.build_model(**(SMALL if PLAN.model == "llama" else {}))
    model = SmallModel()
    model.fill()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Run the forward pass of a wrapped model."""
    if PLAN.model != "small":
        return job.compute_loss(model, batch)
    loss: torch.Tensor = model(batch)
    return loss


def draw_batch(number: int, step: int) -> torch.Tensor:
    """Draw one micro batch of a step."""
    batch = job.draw_batch(number, step, NUM_BATCHES)
    return batch if PLAN.model == "job" else batch[:1, :SMALL_SEQUENCE]


def main() -> None:
    """Train from the newest checkpoint to the planned step."""
    newest = NewestCheckpoint(PLAN)
    model, optimizer = build_model()
    timeout = timedelta(seconds=PLAN.gloo_timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    next_step = newest.restore(model, optimizer)
    LOG.write("restored", RANK, step=next_step)
    wrapped = DistributedDataParallel(model)
    own = range(RANK * NUM_BATCHES // WORLD, (RANK + 1) * NUM_BATCHES // WORLD)
    for step in range(next_step, PLAN.num_steps):
        for number in own:
            time.sleep(PLAN.sleep_s)
            is_last = number == own[-1]
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                loss = compute_loss(wrapped, draw_batch(number, step))
                (loss * WORLD / NUM_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        LOG.write("committed", RANK, step=step, loss=job.loss_bits(loss.detach()), world=WORLD)
        newest.save(model, optimizer, step + 1)


main()

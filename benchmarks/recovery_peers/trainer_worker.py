"""One rank under the node agent: the same model and samples in a transformers.Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from benchmarks.events import EventLog
from benchmarks.faults import FaultInjector, strike_process
from benchmarks.jobplan import MICRO_BATCH, read_plan
from benchmarks.recovery_peers import job
from resilience.frameworks.huggingface import Trainer

PLAN = read_plan()
LOG = EventLog(PLAN.run_dir)
INJECTOR = FaultInjector(PLAN, LOG, strike_process)


class Worker(Trainer):
    """Fires the plan's faults between forward and backward."""

    bits = ""

    def compute_loss(self, *given: Any, **named: Any) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = super().compute_loss(*given, **named)
        self.bits = job.loss_bits(loss.detach())
        INJECTOR.fire(self.args.process_index, self.state.global_step)
        return loss


class Committed(TrainerCallback):
    """Notes each step that counts."""

    worker: Worker

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Fire the plan's faults after the update."""
        INJECTOR.fire(args.process_index, state.global_step, "update")

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Write the step."""
        values = {"loss": self.worker.bits, "world": args.world_size}
        LOG.write("committed", args.process_index, step=state.global_step - 1, **values)


def main() -> None:
    """Train to the planned step."""
    model, _ = job.build_model()
    samples = [
        job.draw_sample(number) for number in range(PLAN.num_steps * PLAN.num_ranks * MICRO_BATCH)
    ]
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(
        f"{PLAN.run_dir}/trained",
        use_cpu=True,
        max_steps=PLAN.num_steps,
        per_device_train_batch_size=MICRO_BATCH,
        **quiet,  # type: ignore[arg-type]
    )
    committed = Committed()
    rows: Any = [{"input_ids": each, "labels": each} for each in samples]
    worker = Worker(model=model, args=arguments, train_dataset=rows, callbacks=[committed])
    committed.worker = worker
    LOG.write("restored", arguments.process_index)
    worker.train()
    digest = job.state_digest(model, worker.optimizer.optimizer)
    LOG.write("finished", arguments.process_index, digest=digest)


if __name__ == "__main__":
    main()

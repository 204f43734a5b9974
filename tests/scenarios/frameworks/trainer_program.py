"""transformers.Trainer: dropout, two workers, accumulation with a rest, evaluation, saves, logs."""

import json
import os

import torch
import transformers
from faulty import FAULTS, OUT, RANK, Places, without_times, write_end
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from resilience.frameworks.huggingface import Trainer


class Rows(Dataset):
    def __init__(self, number: int, seed: int) -> None:
        self.rows = torch.randint(64, (number, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Notes(TrainerCallback):
    """Writes the calls of the callbacks down."""

    def write(self, event: str, state: object, **values: object) -> None:
        with (OUT / f"calls-{RANK}").open("a") as file:
            file.write(json.dumps([event, state.global_step, without_times(values)]) + "\n")

    def on_step_begin(self, args, state, control, **kwargs):
        self.write("step_begin", state)

    def on_step_end(self, args, state, control, **kwargs):
        self.write("step_end", state)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        FAULTS.reach("evaluated")
        self.write("evaluate", state, **metrics)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.write("log", state, **logs)

    def on_save(self, args, state, control, **kwargs):
        FAULTS.reach("saved")
        self.write("save", state)


class Own(TrainerCallback):
    """A callback of rank 0 alone."""


class Program(Places, transformers.Trainer if "PLAIN" in os.environ else Trainer):
    def compute_loss(self, *given, **named):
        if self.model.training:
            self.num_losses = getattr(self, "num_losses", 0) + 1
        return super().compute_loss(*given, **named)


def main(**options: object) -> Trainer:
    torch.manual_seed(0)
    shares = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropout = dict.fromkeys(shares, float(os.environ.get("DROPOUT", "0.1")))
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, **dropout)
    )
    known = {
        "output_dir": str(OUT / "trained"),
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 4,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**known, **options})
    trainer = Program(
        model=model,
        args=arguments,
        train_dataset=Rows(144, seed=1),
        eval_dataset=Rows(32, seed=2),
        callbacks=[Notes(), *([Own()] if RANK == "0" else [])],
    )
    trainer.own_rank = RANK
    resume = os.environ.get("RESUME")
    if resume == "newest":
        resume = get_last_checkpoint(OUT / "trained") if (OUT / "trained").exists() else None
    result = trainer.train(resume_from_checkpoint=resume)
    assert trainer.own_rank == RANK
    assert resume or trainer.num_losses == 2 * 36 // arguments.world_size
    write_end(trainer, result)
    return trainer


if __name__ == "__main__":
    main()

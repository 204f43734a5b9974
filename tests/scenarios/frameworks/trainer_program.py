"""transformers.Trainer: dropout, two workers, accumulation with a rest, evaluation, saves, logs."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from resilience.frameworks import huggingface
from resilience.frameworks.huggingface import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "protection"))
from faults import OUT, Faults, digest_state

FAULTS = Faults()
RANK = os.environ.get("RANK", "0")
TIMES = ("runtime", "per_second")


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
        kept = {key: each for key, each in values.items() if not key.endswith(TIMES)}
        with (OUT / f"calls-{RANK}").open("a") as file:
            file.write(json.dumps([event, state.global_step, kept]) + "\n")

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


class Program(Trainer):
    """Trainer with places for faults."""

    def log(self, *given, **named):
        FAULTS.reach("log")
        super().log(*given, **named)
        FAULTS.reach("logged")

    def prediction_step(self, *given, **named):
        FAULTS.reach("predict")
        return super().prediction_step(*given, **named)

    def _clip_grad_norm(self, model):
        FAULTS.reach("clip")
        return super()._clip_grad_norm(model)

    def _save_checkpoint(self, *given):
        FAULTS.reach("save")
        super()._save_checkpoint(*given)


class FaultyRun(huggingface._TrainerRun):
    def __init__(self, loop, model, also):
        optimizer = loop.trainer.optimizer.optimizer
        FAULTS.watch(model, optimizer)
        super().__init__(loop, model, also)
        FAULTS.follow(self, optimizer)


huggingface._TrainerRun = FaultyRun


def main(**options: object) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
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
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(**{**known, **options})
    trainer = Program(
        model=model,
        args=arguments,
        train_dataset=Rows(144, seed=1),
        eval_dataset=Rows(32, seed=2),
        callbacks=[Notes()],
    )
    result = trainer.train(resume_from_checkpoint=os.environ.get("RESUME"))
    kept = [
        {key: each for key, each in line.items() if not key.endswith(TIMES)}
        for line in trainer.state.log_history
    ]
    told = digest_state(FAULTS.run)
    told |= {"history": kept, "loss": result.training_loss, "flos": trainer.state.total_flos}
    told |= {"rate": trainer.lr_scheduler.state_dict()["last_epoch"], "step": result.global_step}
    (OUT / f"end-{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

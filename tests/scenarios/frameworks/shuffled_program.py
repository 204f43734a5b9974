"""A Trainer whose samples are shuffled with another seed in each process, or in a new one; KIND."""

import os
import random
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from resilience.frameworks.huggingface import Trainer

sys.path.insert(1, str(Path(__file__).parents[1] / "protection"))
from faults import OUT

BEGUN = OUT / f"begun-{os.environ['RANK']}"
IS_NEW = BEGUN.exists()
BEGUN.touch()


class Killed(Trainer):
    def training_step(self, *given: object, **named: object) -> torch.Tensor:
        if self.state.global_step == 1 and os.environ["RANK"] == "1" and not IS_NEW:
            os.kill(os.getpid(), 9)
        return super().training_step(*given, **named)  # type: ignore[no-any-return]


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=64, n_positions=4))
tokens = torch.arange(256).remainder(64).reshape(64, 4)
rows = [{"input_ids": row, "labels": row} for row in tokens]
random.Random(os.environ["RANK"] if os.environ["KIND"] == "each" else IS_NEW).shuffle(rows)
arguments = TrainingArguments(
    output_dir=str(OUT / "trained"), use_cpu=True, max_steps=4, report_to=[], save_strategy="no"
)
Killed(model=model, args=arguments, train_dataset=rows).train()

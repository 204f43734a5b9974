"""Hugging Face's Trainer on a small Llama and made-up tokens, as people write it.

No line is here for the launcher: the recipe's `progress: transformers` reads what the Trainer
prints. A start goes on from the Trainer's own newest checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

RUN_DIR = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))
"""The folder of the run: all its starts see it. Without a launcher, the current one."""

VOCABULARY, LENGTH = 64, 32


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences that count upwards from a random number."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = torch.randint(VOCABULARY, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train; a checkpoint every 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default=str(RUN_DIR / "checkpoints"))
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=options.lr,
        per_device_train_batch_size=4,
        logging_steps=5,
        save_steps=20,
        save_total_limit=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=_newest(options.out))


def _newest(folder: str) -> str | None:
    try:
        return get_last_checkpoint(folder)
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    main()

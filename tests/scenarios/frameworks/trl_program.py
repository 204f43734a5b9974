"""trl's SFTTrainer and DPOTrainer with LoRA and dropout on made-up words; KIND is SFT or DPO."""

import os
import random
import sys
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[3].glob(".venv-frameworks/lib/*/site-packages")))

import datasets
import torch
import trl
from faulty import OUT, Places, write_end
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from resilience.frameworks import huggingface

KIND = os.environ["KIND"]
WORDS = [f"w{number}" for number in range(60)]


class Program(Places, getattr(huggingface, f"{KIND}Trainer")):
    pass


def make_tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    plain = Tokenizer(
        models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_rows() -> datasets.Dataset:
    source = random.Random(0)

    def text() -> str:
        return " ".join(source.choice(WORDS) for _ in range(source.randrange(6, 14)))

    columns = ("text",) if KIND == "SFT" else ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list([{each: text() for each in columns} for _ in range(72)])


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens))
    arguments = getattr(trl, f"{KIND}Config")(
        output_dir=str(OUT / "trained"),
        use_cpu=True,
        bf16=False,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_num_workers=2,
        learning_rate=1e-2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_length=32,
    )
    rows = make_rows()
    trainer = Program(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    write_end(trainer, trainer.train())


main()

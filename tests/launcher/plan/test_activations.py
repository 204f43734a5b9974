"""Activations are within 15 % of what torch's memory tracker sees in a real step on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job.workload import TorchTrainer
from launcher.plan.activations import torch_activations
from tests.cases import grid
from tests.launcher.plan.ranks import train_once
from tests.launcher.plan.worlds import GPT_OSS, LLAMA, job_of, world_of

SIZES = {
    "small": (LLAMA, "model.num_layers=2", "trainer.micro_batch_size=8"),
    "deep": (LLAMA, "model.num_layers=5", "model.hidden_size=192", "model.ffn_hidden_size=512",
             "model.num_heads=6", "trainer.micro_batch_size=8", "model.vocab_size=2000"),
    "words": (LLAMA, "model.num_layers=2", "model.hidden_size=256", "model.ffn_hidden_size=1024",
              "model.num_heads=4", "model.num_kv_heads=4", "model.head_dim=64",
              "trainer.micro_batch_size=1", "data.seq_length=384", "model.vocab_size=8000"),
}  # fmt: skip
EXPERTS = {
    "small": (GPT_OSS,),
    "wide": (GPT_OSS, "model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=192",
             "model.num_experts=8", "model.num_heads=8", "trainer.micro_batch_size=2"),
    "words": (GPT_OSS, "model.hidden_size=256", "model.ffn_hidden_size=256",
              "model.num_experts=16", "model.num_experts_per_token=4", "data.seq_length=256",
              "trainer.micro_batch_size=1", "model.vocab_size=8000"),
}  # fmt: skip
WAYS = {
    "ddp": ("trainer.num_devices=1",),
    "ddp-bf16": ("trainer.num_devices=1", "trainer.precision=bf16", "instance=ml.p5.48xlarge"),
    "fsdp-bf16": ("trainer.num_devices=4", "trainer.sharding=full", "trainer.precision=bf16",
                  "instance=ml.p5.48xlarge"),
}  # fmt: skip


def check(size: tuple[str, ...], way: tuple[str, ...], *, is_recomputed: bool) -> None:
    again = f"trainer.activation_checkpointing={str(is_recomputed).lower()}"
    job = job_of(*size, *way, again, "trainer.global_batch_size=32")
    assert isinstance(job.trainer, TorchTrainer)

    with world_of(job) as group:
        _, seen = train_once(job, group, is_tracked=True)

    planned = torch_activations(job.model, job.trainer, job.data.seq_length).value
    assert planned == pytest.approx(seen, rel=0.15)


def axes(sizes: dict[str, tuple[str, ...]], ways: dict[str, tuple[str, ...]]) -> list[Any]:
    return [
        [pytest.param(value, id=name) for name, value in sizes.items()],
        [pytest.param(value, id=name) for name, value in ways.items()],
    ]


KEEPING = [pytest.param(False, id="kept"), pytest.param(True, id="recomputed")]


@pytest.mark.parametrize(
    ("size", "way", "is_recomputed"),
    grid(*axes(SIZES, WAYS), KEEPING, fast=[
        "small-ddp-kept", "deep-ddp-recomputed", "words-fsdp-bf16-kept",
    ]),
)  # fmt: skip
def test_activations_of_llama(
    size: tuple[str, ...], way: tuple[str, ...], is_recomputed: bool
) -> None:
    check(size, way, is_recomputed=is_recomputed)


@pytest.mark.parametrize(
    ("size", "way", "is_recomputed"),
    grid(*axes(EXPERTS, WAYS), KEEPING, fast=["small-ddp-kept"]),
)
def test_activations_of_gpt_oss(
    size: tuple[str, ...], way: tuple[str, ...], is_recomputed: bool
) -> None:
    check(size, way, is_recomputed=is_recomputed)

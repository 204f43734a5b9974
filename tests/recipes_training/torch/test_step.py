from __future__ import annotations

import json

import pytest
import torch

from recipes_training.torch.step import clip_gradients, gradient_norm
from tests.cases import grid
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job

PROGRAM = "tests.recipes_training.programs:write_norms"


def _norms(workers, folder, job):
    outcome = workers.run(job, folder, target=PROGRAM)
    texts = [(folder / f"norms-{rank}.json").read_text() for rank in range(len(outcome.statuses))]
    assert len(set(texts)) == 1, "norms differ between workers"
    return [[float.fromhex(text) for text in pair] for pair in json.loads(texts[0])]


@pytest.mark.parametrize(
    ("sharding", "num_replicas", "num_workers", "clip_norm"),
    grid(
        [
            pytest.param("none", None, 2, id="ddp"),
            pytest.param("full", None, 4, id="full"),
            pytest.param("hybrid", 2, 4, id="hybrid"),
        ],
        [pytest.param(0.01, id="clips"), pytest.param(1e6, id="keeps")],
        fast={"ddp-keeps", "hybrid-clips"},
    ),
)
def test_norm_is_that_of_single_worker_on_all_ranks(
    workers, tmp_path, sharding, num_replicas, num_workers, clip_norm
):
    options = {"optimizer": {"clip_norm": clip_norm}}
    single = _norms(workers, tmp_path / "single", make_job(trainer=options))
    layout = {"sharding": sharding, "num_replicas": num_replicas, "num_devices": num_workers}

    norms = _norms(workers, tmp_path / "many", make_job(trainer={**options, **layout}))

    for (before, after), (single_before, _) in zip(norms, single, strict=True):
        assert before == pytest.approx(single_before, rel=1e-5)
        assert after == pytest.approx(min(before, clip_norm), rel=1e-3)


@pytest.mark.parametrize(
    ("sharding", "model"),
    grid(
        [pytest.param("none", id="ddp"), pytest.param("full", id="full")],
        [pytest.param(LLAMA, id="llama"), pytest.param(GPT_OSS, id="gpt-oss")],
        fast={"ddp-llama"},
    ),
)
def test_norm_in_bf16_is_near_that_in_fp32(workers, tmp_path, sharding, model):
    """The program computes on the CPU what the job has a GPU for."""
    trainer = {"sharding": sharding, "num_devices": 2, "optimizer": {"clip_norm": None}}
    gpu = {"type": "gpu", "accelerator": "gpu"}

    norms = {
        precision: _norms(
            workers,
            tmp_path / precision,
            make_job(model=model, trainer={**trainer, "precision": precision}, instance=gpu),
        )
        for precision in ("fp32", "bf16")
    }

    assert norms["bf16"] != norms["fp32"]
    assert norms["bf16"][0] == pytest.approx(norms["fp32"][0], rel=0.05)


def test_norm_and_clip_of_known_gradients():
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]

    norm = gradient_norm(gradients, None)
    clip_gradients(gradients, norm, 1.0)

    assert norm.item() == 5.0
    assert gradients[0].tolist() == pytest.approx([0.6, 0.0])
    assert gradients[1].tolist() == [pytest.approx([0.8])]


def test_small_gradients_are_not_scaled():
    gradients = [torch.tensor([0.3])]

    clip_gradients(gradients, gradient_norm(gradients, None), 1.0)

    assert gradients[0].item() == torch.tensor(0.3).item()


def test_balance_of_experts_is_part_of_the_loss(workers, tmp_path):
    losses = {}
    for coef in (0.0, 0.5):
        job = make_job(
            model={**GPT_OSS, "router_aux_loss_coef": coef},
            trainer={"max_steps": 2, "save_checkpoint": False},
        )
        losses[coef] = workers.run(job, tmp_path / str(coef)).losses

    # Perfect balance is num_experts_per_token, and random weights are near it.
    assert losses[0.5][0] - losses[0.0][0] == pytest.approx(0.5 * 2, rel=0.1)
    assert losses[0.5][1] - losses[0.5][0] != losses[0.0][1] - losses[0.0][0]

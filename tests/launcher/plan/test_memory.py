"""The bytes of a rank are those of torch's own objects, and the parts of a node those asked for."""

from __future__ import annotations

import pytest

from launcher.job.parameters import count_parameters
from launcher.job.tiered_memory import tiered_mib
from launcher.job.workload import TorchTrainer
from launcher.plan.figure import GIB, MIB
from launcher.plan.memory import device_memory, node_memory, replica, torch_state
from recipes_training.torch.initial import local_part
from resilience.state.torch_state import TorchState
from tests.cases import slow
from tests.launcher.plan.ranks import shard_on_meta, train_once
from tests.launcher.plan.worlds import GPT_OSS, LLAMA, job_of, world_of
from tests.launcher.shipped import shipped_job

EIGHT_B = ("model=llama3_8b", "data.seq_length=512")
DDP = ("trainer.sharding=none", "trainer.num_devices=4")
FULL = ("trainer.sharding=full", "trainer.num_devices=8", "trainer.global_batch_size=32")
UNEVEN = ("trainer.sharding=full", "trainer.num_devices=6", "trainer.global_batch_size=24")
HYBRID = ("trainer.sharding=hybrid", "trainer.num_replicas=2", "trainer.num_devices=12",
          "trainer.global_batch_size=48")  # fmt: skip


def planned(*overrides: str) -> dict[str, float]:
    job = job_of(*overrides)
    assert isinstance(job.trainer, TorchTrainer)
    return {each.name: each.value for each in torch_state(job.model, job.trainer)}


@pytest.mark.parametrize(("model", "number"), [
    ("llama3_8b", 8_030_261_248),
    ("llama3_70b", 70_553_706_496),
    ("gpt_oss_20b", 20_914_757_184),
    ("gpt_oss_120b", 116_829_156_672),
])  # fmt: skip
def test_published_models_have_their_number_of_parameters(model: str, number: int) -> None:
    recipe = GPT_OSS if "gpt" in model else LLAMA

    assert count_parameters(job_of(recipe, f"model={model}").model) == number


@pytest.mark.parametrize("overrides", [
    pytest.param((LLAMA, *DDP), id="ddp-llama"),
    pytest.param((GPT_OSS, *DDP), id="ddp-gpt-oss"),
    pytest.param((LLAMA, *FULL), id="full-llama"),
    pytest.param((LLAMA, *UNEVEN), id="full-llama-rows-that-do-not-divide"),
    pytest.param((GPT_OSS, *FULL), id="full-gpt-oss-fewer-experts-than-shards"),
    pytest.param((LLAMA, *HYBRID), id="hybrid-llama"),
    pytest.param((GPT_OSS, *HYBRID), id="hybrid-gpt-oss"),
    pytest.param((LLAMA, "model.tie_embeddings=true", *HYBRID), id="hybrid-tied"),
    pytest.param((LLAMA, *EIGHT_B, *HYBRID), id="hybrid-8b"),
])  # fmt: skip
def test_weights_optimizer_and_replica_are_those_of_torch_on_meta(
    overrides: tuple[str, ...],
) -> None:
    job, figures = job_of(*overrides), planned(*overrides)

    with world_of(job):
        core, optimizer = shard_on_meta(job)

        weights = [local_part(each) for each in core.parameters()]
        moments = [local_part(each) for kept in optimizer.state.values() for each in kept.values()]
        state = [each.tensor for each in TorchState(core, optimizer).tensors()]
    assert figures["weights"] == sum(each.nbytes for each in weights)
    assert figures["optimizer"] == sum(each.nbytes for each in moments)
    copied = replica(job).value
    assert copied == (0 if "trainer.sharding=full" in overrides else sum(x.nbytes for x in state))


@pytest.mark.parametrize("overrides", [
    pytest.param((LLAMA, "trainer.num_devices=1"), id="ddp"),
    pytest.param((LLAMA, *UNEVEN), id="full"),
    pytest.param((LLAMA, *HYBRID), id="hybrid"),
    slow((GPT_OSS, *HYBRID), id="hybrid-gpt-oss"),
])  # fmt: skip
def test_gradients_are_those_that_torch_makes(overrides: tuple[str, ...]) -> None:
    """Real tensors and a backward pass, through our reducer and FSDP2 itself."""
    job = job_of(*overrides, "data.seq_length=16", "trainer.micro_batch_size=1")

    # The reducer asks its group for results; a world of one has as many bytes.
    assert isinstance(job.trainer, TorchTrainer)
    backend = "gloo" if job.trainer.sharding == "none" else "fake"
    with world_of(job, backend) as group:
        core, _ = train_once(job, group, is_tracked=False)

        gradients = [local_part(x.grad) for x in core.parameters() if x.grad is not None]
    assert len(gradients) == len(list(core.parameters()))
    assert planned(*overrides)["gradients"] == sum(each.nbytes for each in gradients)


def test_a_run_without_a_second_copy_has_no_replica() -> None:
    assert replica(shipped_job("llama/llama3_70b_pretrain", "slurm")).value == 0


def test_the_fullest_stage_of_a_pipeline_is_told() -> None:
    """The first has four micro batches in flight, the last one alone."""
    job = shipped_job("llama/llama3_70b_pretrain", "slurm")

    activations = next(each for each in device_memory(job) if each.name == "activations")

    assert "20 layers" in activations.formula
    assert "4 micro batches" in activations.formula


def test_a_node_holds_buffers_batches_tiers_and_what_was_asked_for() -> None:
    job = shipped_job(
        "llama/llama3_tiny_checkpointless_mmap", "slurm",
        ["resources.shm_gib=2", "resources.hugepages_2mi_mib=64"],
    )  # fmt: skip

    parts = {each.name: each.value for each in node_memory(job)}

    assert parts == {
        "transfer buffers": 2 * 32 * MIB,
        "batch cache": 2 * 16 * MIB,
        "other shared memory": 2 * GIB - 96 * MIB,
        "tiers": tiered_mib(job) * MIB,
        "huge pages": 64 * MIB,
        "processes": 3 * GIB,
    }


@pytest.mark.parametrize(("override", "formula"), [
    ("resilience.mmap=null", "0, as resilience.mmap is null"),
    ("resilience.mmap.folder=/scratch", "0, as resilience.mmap.folder is no memory"),
])  # fmt: skip
def test_batches_that_are_not_in_memory_take_none(override: str, formula: str) -> None:
    job = shipped_job("llama/llama3_tiny_checkpointless_mmap", "slurm", [override])

    (cache,) = (each for each in node_memory(job) if each.name == "batch cache")

    assert (cache.value, cache.formula) == (0, formula)

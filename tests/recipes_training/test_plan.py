from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes_training.environment import parse_environment
from recipes_training.errors import DataError, PlacementError
from recipes_training.plan import (
    MeshPlan,
    Schedule,
    check_layout,
    check_vocabulary,
    check_world_size,
    has_weight_decay,
    is_logged,
    plan_adamw,
    plan_copy,
    plan_device_type,
    plan_files,
    plan_layout,
    plan_mesh,
    plan_model_config,
    plan_placement,
    plan_schedule,
    plan_split,
    shard_rows,
)
from resilience.state.layout import make_layout
from tests.launcher.shipped import shipped_job
from tests.recipes_training.jobs import GPT_OSS, MEGATRON, MODEL_KEYS, make_job, with_other_value
from tests.recipes_training.workers import rank_variables

SCHEDULE = Schedule(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=10)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        pytest.param(0, 0.2, id="first-step-is-not-zero"),
        pytest.param(1, 0.4, id="warm-up"),
        pytest.param(3, 0.8, id="last-of-warm-up"),
        pytest.param(4, 1.0, id="peak"),
        pytest.param(7, 0.55, id="half-way"),
        pytest.param(9, 0.1 + 0.45 * (1 + math.cos(math.pi * 5 / 6)), id="last-of-decay"),
        pytest.param(10, 0.1, id="min-lr-reached"),
        pytest.param(99, 0.1, id="constant-after"),
    ],
)
def test_schedule(step, lr):
    assert SCHEDULE.lr_at(step) == pytest.approx(lr)
    assert replace(SCHEDULE, warmup_steps=0).lr_at(0) == 1.0


def test_schedule_spans_the_run_unless_told():
    assert plan_schedule(make_job(trainer={"max_steps": 50})).decay_steps == 50
    options = {"decay_steps": 20, "warmup_steps": 5}
    schedule = plan_schedule(make_job(trainer={"max_steps": 50, "optimizer": options}))
    assert (schedule.decay_steps, schedule.warmup_steps) == (20, 5)


_RENAMED = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_parameters",
    "rope_scaling": "rope_parameters",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
}


@pytest.mark.parametrize(("model", "key"), MODEL_KEYS)
def test_every_key_of_a_model_reaches_its_config(model, key):
    before = plan_model_config(make_job(model=model).model)
    after = plan_model_config(make_job(model=with_other_value(model, key)).model)

    changed = {name for name in before if before[name] != after[name]}
    assert changed == {_RENAMED.get(key, key)}


@pytest.mark.parametrize("key", GPT_OSS["rope_scaling"])
def test_every_key_of_yarn_reaches_the_config(key):
    yarn = {**GPT_OSS["rope_scaling"]}
    yarn[key] = True if key == "truncate" else yarn[key] * 2

    before = plan_model_config(make_job(model=GPT_OSS).model)
    after = plan_model_config(make_job(model={**GPT_OSS, "rope_scaling": yarn}).model)

    assert before["rope_parameters"] != after["rope_parameters"]


def test_adamw_takes_all_of_its_options():
    options = {"lr": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3}

    planned = plan_adamw(make_job(trainer={"optimizer": options}).trainer.optimizer)

    assert planned == {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3}


@pytest.mark.parametrize(
    ("name", "num_axes", "is_decayed"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 2, True),
        ("model.embed_tokens.weight", 2, True),
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", 2, False),
        ("model.layers.0.self_attn.q_proj.bias", 1, False),
        ("model.layers.0.self_attn.sinks", 1, False),
        ("model.norm.weight", 1, False),
    ],
)
def test_only_matrices_are_decayed(name, num_axes, is_decayed):
    assert has_weight_decay(name, num_axes) is is_decayed


@pytest.mark.parametrize(
    ("trainer", "world_size", "mesh"),
    [
        pytest.param({"sharding": "none"}, 4, None, id="ddp"),
        pytest.param({"sharding": "full"}, 4, MeshPlan(axes=("shard",), sizes=(4,)), id="full"),
        pytest.param(
            {"sharding": "hybrid", "num_replicas": 2, "num_devices": 4},
            4,
            MeshPlan(axes=("replicate", "shard"), sizes=(2, 2)),
            id="hybrid",
        ),
    ],
)
def test_mesh(trainer, world_size, mesh):
    assert plan_mesh(make_job(trainer=trainer).trainer, world_size) == mesh


@pytest.mark.parametrize(("batch", "sizes"), [(24, [3, 3, 3, 3]), (10, [1, 1, 1, 2])])
def test_accumulation_follows_from_the_batch(batch, sizes):
    split = plan_split(make_job(trainer={"global_batch_size": batch, "micro_batch_size": 2}), 4)

    shares = [split.micro_batches(rank) for rank in range(4)]
    assert [len(share) for share in shares] == sizes
    assert [number for share in shares for number in share] == list(range(batch // 2))


def test_world_size_of_the_job_is_asked_for():
    with pytest.raises(PlacementError, match=r"world size 3 is not the job's 1 \(trainer.num_nod"):
        check_world_size(make_job(), 3)


def test_elastic_job_takes_every_world_size_that_its_micro_batches_suffice_for():
    elastic = shipped_job("llama/llama3_tiny_elastic", "local").resilience.elastic
    job = make_job(resilience={"elastic": elastic.model_dump(mode="json")})

    check_world_size(job, 3)
    with pytest.raises(PlacementError, match=r"2, fewer than the 5 data-parallel ranks"):
        check_world_size(job, 5)


@pytest.mark.parametrize(("accelerator", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_device_is_that_of_the_instance(accelerator, device):
    assert plan_device_type(make_job(instance={"accelerator": accelerator})) == device


def test_vocabulary_has_to_hold_the_tokens():
    model = make_job().model

    check_vocabulary(model, 259, "t")
    with pytest.raises(DataError, match=r"'t' has 260 tokens and model.vocab_size is 259; set"):
        check_vocabulary(model, 260, "t")


@pytest.mark.parametrize(
    ("every", "logged"),
    [(1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (100, [0, 7])],
)
def test_logged_steps(every, logged):
    steps = [step for step in range(8) if is_logged(step, log_every_n_steps=every, max_steps=8)]

    assert steps == logged


@given(num_rows=st.integers(1, 50), num_shards=st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_them(num_rows, num_shards):
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(num_rows), num_shards)]
    chunks += [[]] * (num_shards - len(chunks))

    ours = [
        list(shard_rows(num_rows, num_shards=num_shards, shard=shard))
        for shard in range(num_shards)
    ]

    assert ours == chunks


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=30), bytes_max=st.integers(1, 40))
def test_files_hold_all_tensors_in_order_and_are_not_too_large(sizes, bytes_max):
    named = {str(number): size for number, size in enumerate(sizes)}

    files = plan_files(named, bytes_max)

    assert [name for names in files for name in names] == list(named)
    for names in files:
        assert len(names) == 1 or sum(named[name] for name in names) <= bytes_max


@pytest.mark.parametrize(
    ("sharding", "num_replicas", "num_nodes", "num_devices"),
    [
        pytest.param("none", None, 2, 2, id="none"),
        pytest.param("none", None, 1, 1, id="none-of-one"),
        pytest.param("full", None, 2, 2, id="full"),
        pytest.param("full", None, 1, 1, id="full-of-one"),
        pytest.param("hybrid", 2, 2, 4, id="hybrid"),
        pytest.param("hybrid", 4, 2, 4, id="hybrid-within-a-node"),
        pytest.param("hybrid", 4, 2, 2, id="hybrid-of-whole-copies"),
    ],
)
def test_layout_is_that_of_the_mesh_and_of_earlier_runs(
    sharding, num_replicas, num_nodes, num_devices
):
    """States and checkpoints of earlier runs stand under these names of shards."""
    own = {"sharding": sharding, "num_replicas": num_replicas, "num_nodes": num_nodes}
    job = make_job(trainer={**own, "num_devices": num_devices, "global_batch_size": 16})
    world_size = num_nodes * num_devices
    variables = {**rank_variables(0, world_size, 1), "LOCAL_WORLD_SIZE": str(num_devices)}
    environment = parse_environment(variables)

    layout = plan_layout(job, environment)

    num_shards = {"none": 1, "full": world_size}.get(sharding, world_size // (num_replicas or 1))
    assert layout.num_replicas == job.trainer.replicas
    assert layout.num_shards == (job.trainer.num_shards or 1)
    for rank in range(world_size):
        placement = plan_placement(job.trainer, layout, rank)
        shard = "" if sharding == "none" else str(rank % num_shards)
        assert (placement.replica, placement.shard) == (rank // num_shards, shard)
        assert (placement.data_rank, placement.data_size) == (rank, world_size)
        local = range(rank - rank % num_devices, rank)
        assert placement.writes_shard == all(
            plan_placement(job.trainer, layout, other).shard != shard for other in local
        )


@pytest.mark.parametrize(
    ("trainer", "num_shards", "words"),
    [
        ({"sharding": "full"}, None, "needs --shards=4 .* started with no --shards"),
        ({"sharding": "none"}, 2, "needs no --shards .* started with --shards=2"),
        ({"sharding": "full"}, 2, "needs --shards=4 .* started with --shards=2"),
        (
            {**MEGATRON, "pipeline_parallel": 2, "num_replicas": 2},
            2,
            r"--shards=2 --stages=2 .* started with --shards=2$",
        ),
    ],
)
def test_agents_that_were_told_other_shards_than_the_job_has_are_refused(
    trainer, num_shards, words
):
    """Each rank would take another part of the state for its own."""
    job = make_job(trainer={**trainer, "num_devices": 4})
    layout = make_layout(nodes=["n0"], num_local_ranks=4, num_shards=num_shards or 1)

    with pytest.raises(PlacementError, match=words):
        check_layout(job, layout)


@pytest.mark.parametrize(
    ("trainer", "data", "shards", "replicas"),
    [
        pytest.param({}, [0, 1, 2, 3], ["0", "1", "0", "1"], [0, 0, 1, 1], id="sharded"),
        pytest.param(
            {"tensor_parallel": 2}, [0, 0, 1, 1], ["0", "1", "0", "1"], [0, 0, 1, 1], id="tensor"
        ),
        pytest.param(
            {"pipeline_parallel": 2},
            [0, 1, 0, 1],
            ["0", "0", "1", "1"],
            [0, 1, 0, 1],
            id="pipeline",
        ),
    ],
)
def test_ranks_of_megatron_stand_in_its_order(trainer, data, shards, replicas):
    """tp-cp-ep-dp-pp, as `parallel_state` numbers them by default."""
    own = {**MEGATRON, **trainer, "num_devices": 4, "num_replicas": 2}
    job = make_job(model={"vocab_size": 260}, trainer=own)
    layout = plan_copy(job, 4).layout(["n0"], 4)

    check_layout(job, layout)
    found = [plan_placement(job.trainer, layout, rank) for rank in range(4)]

    assert [each.data_rank for each in found] == data
    assert {each.data_size for each in found} == {max(data) + 1}
    assert [each.shard for each in found] == shards
    assert [each.replica for each in found] == replicas

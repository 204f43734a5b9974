"""What a rank's device and a node's memory hold. Pure.

Bytes of weights, gradients, optimizer and replica are those of the tensors that torch's and
Megatron-Core's own objects have; tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from launcher.job.content import TrainingContent
from launcher.job.mmap_rules import num_positions
from launcher.job.parameters import EXPERTS, layer_shapes, other_shapes
from launcher.job.tiered_memory import WORKER_MEMORY_GIB, tiered_mib
from launcher.job.workload import MegatronTrainer, Model, TorchTrainer
from launcher.plan.activations import megatron_activations, torch_activations
from launcher.plan.figure import GIB, MIB, Figure, add_up, in_gib

STATE = ("weights", "gradients", "optimizer")
"""What a device holds whatever is computed: no estimate is in it."""
_TORCH = "recipes_training/torch/model.py"
_MEGATRON = "recipes_training/megatron/plan.py"
# Norms, the router and what is added behind a product are whole on each tensor rank.
_WHOLE = ("layernorm.weight", "o_proj.bias", ".router.")
_SCALAR_BYTES = 4


def device_memory(job: TrainingContent) -> tuple[Figure, ...]:
    """Return the parts of the memory of one device: the fullest one's, where they differ."""
    trainer, seq_length = job.trainer, job.data.seq_length
    if isinstance(trainer, TorchTrainer):
        return (
            *torch_state(job.model, trainer),
            torch_activations(job.model, trainer, seq_length),
            _gathered(job.model, trainer),
        )
    stages = [
        (
            *megatron_state(job.model, trainer, stage=stage),
            megatron_activations(job.model, trainer, seq_length, stage=stage),
        )
        # The first has the most micro batches in flight, the last the output and the loss; those
        # between have no matrix that the first lacks.
        for stage in sorted({0, trainer.pipeline_parallel - 1})
    ]
    return max(stages, key=add_up)


def torch_state(model: Model, trainer: TorchTrainer) -> tuple[Figure, ...]:
    """Return what the rank with the largest shard holds in plain PyTorch.

    What trainer.order_of_sums=fixed keeps of gradients besides is left out.
    """
    shards = trainer.num_shards or 1
    layer, others = layer_shapes(model), other_shapes(model)
    values = model.num_layers * _shard(layer, shards) + _shard(others, shards)
    num_tensors = model.num_layers * len(layer) + len(others)
    return (
        _held("weights", 4 * values, f"{values:,} values of {shards} shards x 4 bytes", _TORCH),
        _held("gradients", 4 * values, f"{values:,} values x 4 bytes", _TORCH),
        _held(
            "optimizer",
            8 * values + _SCALAR_BYTES * num_tensors,
            f"{values:,} values x 2 moments x 4 bytes + {num_tensors:,} steps",
            "torch.optim.AdamW",
        ),
    )


def _shard(tensors: Mapping[str, tuple[int, ...]], num_shards: int) -> int:
    """Return the values of the largest shard: that of the first rank."""
    return sum(-(-rows // num_shards) * math.prod(rest) for rows, *rest in tensors.values())


def megatron_state(model: Model, trainer: MegatronTrainer, *, stage: int) -> tuple[Figure, ...]:
    """Return what a rank of a pipeline's stage, counted from 0, holds under Megatron-Core."""
    dense, experts = _megatron_values(model, trainer, stage)
    values = dense + experts
    ranks = trainer.world_size // trainer.pipeline_parallel // trainer.num_replicas
    dense_ranks = max(1, ranks // trainer.tensor_parallel)
    # Megatron gives experts groups of their own under expert parallelism alone.
    has_groups = trainer.expert_parallel > 1
    expert_ranks = max(1, ranks // trainer.expert_parallel) if has_groups else dense_ranks
    own = -(-dense // dense_ranks) + -(-experts // expert_ranks)
    # Two moments and, where the model's weights have 16 bits, weights of 32.
    size, copies = (2, 3) if trainer.precision == "bf16" else (4, 2)
    shared = f"{dense:,} values / {dense_ranks} ranks"
    if experts:
        shared += f" + {experts:,} of experts / {expert_ranks}"
    return (
        _held("weights", size * values, f"{values:,} values x {size} bytes", _MEGATRON),
        _held("gradients", 4 * values, f"{values:,} values x 4 bytes", _MEGATRON),
        _held("optimizer", 4 * copies * own, f"({shared}) x {copies} x 4 bytes", _MEGATRON),
    )


def _megatron_values(model: Model, trainer: MegatronTrainer, stage: int) -> tuple[int, int]:
    """Return the values of a stage on one rank: those that tensor ranks divide, and experts'."""
    tensor, last = trainer.tensor_parallel, trainer.pipeline_parallel - 1
    dense = experts = 0
    for name, shape in layer_shapes(model).items():
        if EXPERTS in name:
            experts += math.prod(shape) // trainer.expert_parallel
        else:
            is_whole = any(each in name for each in _WHOLE)
            dense += math.prod(shape) // (1 if is_whole else tensor)
    num_layers = -(-model.num_layers // trainer.pipeline_parallel)
    dense *= num_layers
    if stage == 0:
        dense += model.vocab_size * model.hidden_size // tensor
    if stage == last:
        dense += model.hidden_size
        is_shared = model.tie_embeddings and last == 0
        dense += 0 if is_shared else model.vocab_size * model.hidden_size // tensor
    return dense, num_layers * experts


def _gathered(model: Model, trainer: TorchTrainer) -> Figure:
    """Return what FSDP2 has whole at a time: what is in no layer, and two layers' weights."""
    size = 2 if trainer.precision == "bf16" else 4
    layer, others = _shard(layer_shapes(model), 1), _shard(other_shapes(model), 1)
    if trainer.sharding == "none":
        return _held("gathered", 0, "0, as each rank holds all", _TORCH)
    # In no layer: weights and gradients. Of layers: weights of two, gradients of one and their sum.
    return _held(
        "gathered",
        size * (2 * others + 3 * layer) + 4 * layer,
        f"{2 * size} bytes x {others:,} values in no layer + {3 * size + 4} bytes x {layer:,} of "
        "a layer",
        "FSDP2",
    )


def replica(job: TrainingContent) -> Figure:
    """Return the part of the training state on a rank that another one holds as well, if any."""
    trainer = job.trainer
    if isinstance(trainer, TorchTrainer):
        weights, _, optimizer = torch_state(job.model, trainer)
        state = add_up((weights, optimizer))
    else:
        stages = sorted({0, trainer.pipeline_parallel - 1})
        own = max(
            round(megatron_state(job.model, trainer, stage=stage)[2].value) for stage in stages
        )
        # Without bf16 the optimizer's weights are the model's own.
        state = own if trainer.precision == "bf16" else own * 3 // 2
    return Figure(
        name="replica",
        value=state if trainer.replicas > 1 else 0,
        unit="bytes",
        formula=f"weights and moments in 32 bits, above, which {trainer.replicas} ranks hold"
        if trainer.replicas > 1
        else "0, as there is one copy of the state",
        source="resilience/checkpointless",
    )


def node_memory(job: TrainingContent) -> tuple[Figure, ...]:
    """Return the parts of the memory of one node beside its devices'."""
    resources, num_workers = job.resources, job.trainer.num_devices
    num_spares, huge_mib = job.resilience.spares_per_node, resources.hugepages_2mi_mib
    buffers, cache, tiers_mib = _buffers(job), _cache(job), tiered_mib(job)
    shared = resources.shm_gib * GIB - add_up((buffers, cache))
    return (
        buffers,
        cache,
        _held("other shared memory", shared,
              f"resources.shm_gib {resources.shm_gib} without the two above", "the recipe"),
        _held("tiers", tiers_mib * MIB, f"{tiers_mib} MiB: checkpoints in memory, and memoryd",
              "launcher/job/tiered_memory.py"),
        _held("huge pages", huge_mib * MIB, f"resources.hugepages_2mi_mib {huge_mib}",
              "the recipe"),
        _held("processes", (num_workers + num_spares) * WORKER_MEMORY_GIB * GIB,
              f"{WORKER_MEMORY_GIB} GiB x {num_workers} workers and {num_spares} spares",
              "launcher/job/rules.py"),
    )  # fmt: skip


def _buffers(job: TrainingContent) -> Figure:
    name, source = "transfer buffers", "resilience.checkpointless.transfer_buffer_mib"
    settings, num_workers = job.resilience.checkpointless, job.trainer.num_devices
    if settings is None:
        return _held(name, 0, "0, as resilience.checkpointless is null", source)
    formula = f"{settings.transfer_buffer_mib} MiB x {num_workers} workers"
    return _held(name, settings.shm_mib(num_workers) * MIB, formula, source)


def _cache(job: TrainingContent) -> Figure:
    name, source = "batch cache", "resilience.mmap.budget_mib"
    settings, positions = job.resilience.batches, num_positions(job)
    if settings is None:
        return _held(name, 0, "0, as resilience.mmap is null", source)
    if not (shared_mib := settings.shm_mib(positions)):
        return _held(name, 0, "0, as resilience.mmap.folder is no memory", source)
    formula = f"{settings.budget_mib} MiB x {positions} data-parallel positions"
    return _held(name, shared_mib * MIB, formula, source)


def together(figures: tuple[Figure, ...], capacity_gib: float, source: str) -> Figure:
    """Return the sum of the parts, whose formula is what there is."""
    return _held("together", add_up(figures), f"of {in_gib(capacity_gib * GIB)}", source)


def _held(name: str, value: int, formula: str, source: str) -> Figure:
    return Figure(name=name, value=value, unit="bytes", formula=formula, source=source)

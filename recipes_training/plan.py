"""What a trainer does with a job: pure functions from its fields.

Nothing here imports torch, reads a file or knows which worker it runs in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.job import TrainingJob
from launcher.job.workload import (
    GptOssModel,
    Model,
    Optimizer,
    OwnTrainerSettings,
    TorchTrainer,
)
from recipes_training.data.order import Split
from recipes_training.data.position import Position
from recipes_training.environment import WorkerEnvironment
from recipes_training.errors import DataError, PlacementError
from resilience.state.layout import Layout, make_layout

InitialValue = Literal["ones", "zeros", "normal"]


def check_world_size(job: TrainingJob, world_size: int, *, is_passing: bool = False) -> None:
    """Refuse a number of workers that the job does not have.

    An elastic job takes any number of nodes between its bounds, provided that
    its batch and its copies of the state divide.
    """
    trainer, elastic = job.trainer, job.resilience.elastic
    if elastic is None and world_size != trainer.world_size:
        raise PlacementError(
            f"world size {world_size} is not the job's {trainer.world_size} "
            f"(trainer.num_nodes {trainer.num_nodes} x trainer.num_devices "
            f"{trainer.num_devices}); start as many workers as the job has"
        )
    data_size = world_size // trainer.model_parallel_size
    # A generation that takes no step divides no batch.
    if not is_passing and (problem := trainer.find_batch_problem(data_size)):
        raise PlacementError(problem)
    if elastic and world_size % (shards := trainer.num_shards or 1):
        raise PlacementError(
            f"world size {world_size} does not divide by the {shards} ranks that hold one copy of "
            "the state"
        )


def check_layout(job: TrainingJob, layout: Layout, *, is_passing: bool = False) -> None:
    """Refuse a world that the job does not have, or one that holds its state in another way."""
    check_world_size(job, layout.world_size, is_passing=is_passing)
    wanted = plan_copy(job, layout.world_size)
    given = CopyPlan(
        num_shards=layout.num_shards, is_sharded=layout.is_sharded, num_stages=layout.num_stages
    )
    if given != wanted:
        raise PlacementError(
            f"the job's trainer needs {wanted.options()} on the node agents' command lines, and "
            f"they were started with {given.options()}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """How the ranks divide the copies of the state, as a layout has it."""

    num_shards: int
    is_sharded: bool
    num_stages: int

    def options(self) -> str:
        """Return the node agent's options that say so."""
        if not self.is_sharded:
            return "no --shards"
        stages = f" --stages={self.num_stages}" if self.num_stages > 1 else ""
        return f"--shards={self.num_shards}{stages}"

    def layout(self, nodes: Sequence[str], num_local_ranks: int) -> Layout:
        """Return who holds what on these nodes of so many ranks each; their product is the world.

        Raises ValueError where the world does not divide.
        """
        return make_layout(
            nodes=nodes,
            num_local_ranks=num_local_ranks,
            num_shards=self.num_shards,
            is_sharded=self.is_sharded,
            num_stages=self.num_stages,
        )


def plan_copy(job: TrainingJob, world_size: int) -> CopyPlan:
    """Return how the job's trainer divides a copy of the state in a world of that size."""
    trainer = job.trainer
    if isinstance(trainer, TorchTrainer):
        mesh = plan_mesh(trainer, world_size)
        return CopyPlan(
            num_shards=mesh.sizes[-1] if mesh else 1, is_sharded=mesh is not None, num_stages=1
        )
    return CopyPlan(
        num_shards=world_size // trainer.num_replicas,
        is_sharded=True,
        num_stages=trainer.num_stages,
    )


def plan_device_type(job: TrainingJob) -> Literal["cpu", "cuda"]:
    """Return the device that the job's instance has.

    The instance decides, not the machine: a node whose GPUs are lost must not
    train on its CPU.
    """
    return "cuda" if job.instance.accelerator == "gpu" else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one rank has to do with state and data in one generation."""

    replica: int
    """Which copy of the state the rank holds a part of."""
    shard: str
    """Which part of the copy; ranks with equal ones hold the same bits."""
    data_rank: int
    """Which part of each global batch the rank reads."""
    data_size: int
    """In how many parts a global batch is divided."""
    writes_shard: bool
    """Whether the rank writes its shard on its node: the first of the node that holds it does."""


def plan_layout(job: TrainingJob, environment: WorkerEnvironment) -> Layout:
    """Return who holds what in a world that the environment tells of; nodes are numbered.

    Raises PlacementError where the worker's numbers do not fit each other.
    """
    world_size = environment.world_size
    num_local_ranks = environment.local_world_size or job.trainer.num_devices
    if environment.local_world_size is None and world_size % num_local_ranks:
        num_local_ranks = world_size
    if num_local_ranks < 1 or world_size % num_local_ranks:
        raise PlacementError(
            f"the variable LOCAL_WORLD_SIZE is {num_local_ranks} and WORLD_SIZE is {world_size}, "
            "which is no multiple of it; start as many workers on each node"
        )
    if not 0 <= environment.rank < world_size:
        raise PlacementError(
            f"the variable RANK is {environment.rank}; allowed: 0 to {world_size - 1}, as "
            f"WORLD_SIZE is {world_size}"
        )
    nodes = [f"node-{number}" for number in range(world_size // num_local_ranks)]
    return plan_copy(job, world_size).layout(nodes, num_local_ranks)


def plan_placement(trainer: OwnTrainerSettings, layout: Layout, rank: int) -> Placement:
    """Return what a rank has to do with state and data.

    The ranks of a tensor-parallel group follow each other, and those that read different data
    follow within a stage: Megatron's order "tp-cp-ep-dp-pp".
    """
    seat = layout.seat(rank)
    before = range(rank - seat.local_rank, rank)
    stage_size = layout.world_size // layout.num_stages
    group_size = trainer.model_parallel_size // layout.num_stages
    return Placement(
        replica=seat.replica,
        shard=seat.shard,
        data_rank=rank % stage_size // group_size,
        data_size=stage_size // group_size,
        writes_shard=all(layout.seat(other).shard != seat.shard for other in before),
    )


LOG_RANK = 0
"""The rank that logs steps; all know their loss."""


def plan_split(job: TrainingJob, data_size: int, position: Position | None = None) -> Split:
    """Return how a step's samples are divided over so many ranks.

    Without a position the run has taken its batch from the first step on.
    """
    return Split(
        global_batch_size=job.trainer.global_batch_size,
        micro_batch_size=job.trainer.micro_batch_size,
        world_size=data_size,
        first_step=position.step if position else 0,
        first_sample=position.sample if position else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The device mesh of FSDP2: names and sizes of its axes, slowest first."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


def plan_mesh(trainer: TorchTrainer, world_size: int) -> MeshPlan | None:
    """Return the mesh that parameters are sharded over; None means whole copies."""
    if trainer.sharding == "none":
        return None
    if trainer.sharding == "full":
        return MeshPlan(axes=("shard",), sizes=(world_size,))
    shards = trainer.num_shards
    assert shards
    # Copies come and go with the run's size; each keeps its number of ranks.
    return MeshPlan(axes=("replicate", "shard"), sizes=(world_size // shards, shards))


def plan_model_config(model: Model) -> dict[str, Any]:
    """Return the keyword arguments of LlamaConfig or GptOssConfig."""
    config: dict[str, Any] = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if isinstance(model, GptOssModel):
        config |= _expert_config(model)
    return config


def _expert_config(model: GptOssModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss_coef,
        "sliding_window": model.sliding_window,
    }
    if yarn := model.rope_scaling:
        config["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": model.rope_theta,
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
            "original_max_position_embeddings": yarn.original_context_length,
        }
    return config


def aux_loss_coef(model: Model) -> float:
    """Return the weight of the loss that balances experts; 0 means there is none."""
    return model.router_aux_loss_coef if isinstance(model, GptOssModel) else 0.0


def check_vocabulary(model: Model, num_tokens: int, tokenizer: str) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings."""
    if num_tokens > model.vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer!r} has {num_tokens} tokens and model.vocab_size is "
            f"{model.vocab_size}; set model.vocab_size to at least {num_tokens}"
        )


def classify_parameter(name: str) -> InitialValue:
    """Return how a parameter starts, by its Hugging Face name.

    As in their own initialisation: norms are ones and biases zeros, but the
    router's bias and the attention sinks of GPT-OSS are drawn like weights.
    """
    if name.endswith("norm.weight"):
        return "ones"
    if name.endswith("bias") and not name.endswith("router.bias"):
        return "zeros"
    return "normal"


def has_weight_decay(name: str, num_axes: int) -> bool:
    """Return whether a parameter is decayed: matrices are, norms, biases and sinks are not."""
    return num_axes >= 2 and not name.endswith("bias")


def plan_adamw(optimizer: Optimizer) -> dict[str, Any]:
    """Return the keyword arguments of AdamW that all its groups share."""
    return {
        "lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, cosine decay, then constant; a function of the step alone."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; the first is not zero."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if step >= self.decay_steps:
            return self.min_lr
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def plan_schedule(job: TrainingJob) -> Schedule:
    """Return the job's learning rates; without decay_steps they span the whole run."""
    optimizer = job.trainer.optimizer
    return Schedule(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=optimizer.decay_steps or job.trainer.max_steps,
    )


def is_logged(step: int, *, log_every_n_steps: int, max_steps: int) -> bool:
    """Return whether a step is reported: the first, the last and every nth between."""
    return step % log_every_n_steps == 0 or step == max_steps - 1


def shard_rows(num_rows: int, *, num_shards: int, shard: int) -> range:
    """Return the rows of the first axis that a shard holds; the last ones may be empty."""
    rows_per_shard = -(-num_rows // num_shards)
    start = min(num_rows, shard * rows_per_shard)
    return range(start, min(num_rows, start + rows_per_shard))


def plan_files(sizes: Mapping[str, int], bytes_max: int) -> list[list[str]]:
    """Divide named tensors over files of at most `bytes_max`, in order.

    A tensor larger than that has a file of its own.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = bytes_max
        files[-1].append(name)
        room -= size
    return files

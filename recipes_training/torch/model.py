"""Builds the model of a job and spreads it over the workers.

The model is built without memory, sharded, and only then filled, so that a
worker never holds more than its shard and one block.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from launcher.job import TrainingJob
from launcher.job.workload import Model, TorchTrainer
from recipes_training.group import WorkerGroup, keep
from recipes_training.plan import MeshPlan, plan_mesh, plan_model_config
from recipes_training.torch.initial import fill_parameters
from recipes_training.torch.weights import load_parameters
from recipes_training.weights.folder import check_weights, open_weights

if TYPE_CHECKING:  # a run without the feature imports nothing of it
    from resilience.comm.reducer import GradientReducer
    from resilience.comm.tree_reducer import TreeReducer


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadModel:
    """A model over all workers: `run` computes, `core` has Hugging Face's names."""

    run: nn.Module
    core: nn.Module
    num_shards: int | None
    """How many workers hold one copy together; None where each holds a whole one."""
    reducer: GradientReducer | TreeReducer | None = None
    """Set where each worker holds a whole copy."""
    tree: TreeReducer | None = None
    """The reducer, where sums have one order at any number of workers."""
    sums: list[Tensor] = field(default_factory=list)
    """Sums of the gradients that this worker has given to reductions, where those are ours."""

    @property
    def layers(self) -> list[nn.Module]:
        """Return the model's layers in the order of the forward pass."""
        layers: Any = self.core.get_submodule("model.layers")
        return list(layers)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Let copies exchange gradients in the last micro batch of a step, and only there.

        Within a sharded copy every micro batch is reduced: to keep gradients for
        later would take the memory of the whole model on each worker.
        """
        if self.reducer is not None:
            return self.reducer.micro_batch(is_last=is_last)
        assert isinstance(self.run, FSDPModule)
        self.run.set_requires_all_reduce(is_last)
        return nullcontext()


def build_core(job: TrainingJob, trainer: TorchTrainer) -> nn.Module:
    """Build the job's model without memory; needs no other worker.

    Raises WeightsError where the job's weights are those of another model.
    """
    config = plan_model_config(job.model)
    if job.model.weights:
        check_weights(Path(job.model.weights), job.model)
    core = _build_empty(job.model, config)
    if trainer.activation_checkpointing:
        _checkpoint_layers(core)
    return core


def spread_core(
    core: Any,
    trainer: TorchTrainer,
    model: Model,
    group: WorkerGroup,
    *,
    is_restartable: bool = False,
) -> SpreadModel:
    """Shard or replicate a model over the workers, and give it memory where it has none.

    A restartable one can be bound to the groups of another generation, by
    `rebind.take_groups`.
    """
    mesh_plan = plan_mesh(trainer, group.world_size)
    num_shards = None
    if mesh_plan:
        mesh = _open_mesh(mesh_plan, group.device.type, is_restartable=is_restartable)
        _shard(core, mesh, trainer)
        num_shards = mesh_plan.sizes[-1]
    give_memory(core, model, group.device)
    sums: list[Tensor] = []
    reducer: GradientReducer | TreeReducer | None = None
    tree: TreeReducer | None = None
    if trainer.order_of_sums == "fixed":
        from resilience.comm.tree_reducer import TreeReducer

        reducer = tree = TreeReducer(core, num_terms=trainer.num_micro_batches, on_sum=sums.append)
    elif mesh_plan is None:
        from resilience.comm.reducer import GradientReducer

        reducer = GradientReducer(core, on_sum=sums.append)
    elif is_restartable and group.device.type == "cpu":
        from resilience.protection.fsdp_step import end_waits

        end_waits(core, sums.append)
    if not is_restartable:
        keep((core, reducer))
    return SpreadModel(
        run=core.train(), core=core, num_shards=num_shards, reducer=reducer, tree=tree, sums=sums
    )


def give_memory(core: nn.Module, model: Model, device: torch.device) -> None:
    """Allocate what `build_core` left out, with nothing sensible in it; once."""
    if any(parameter.is_meta for parameter in core.parameters()):
        core.to_empty(device=device)
        _restore_ties_and_buffers(core, model, device)


def fill_core(job: TrainingJob, core: nn.Module) -> None:
    """Set every parameter to what it is before the first step."""
    if job.model.weights:
        load_parameters(core, open_weights(Path(job.model.weights), job.model))
    else:
        fill_parameters(core, seed=job.trainer.seed, std=job.model.init_std)


def _build_empty(model: Model, config: dict[str, Any]) -> nn.Module:
    # Loops over experts: one order of sums on every device.
    with torch.device("meta"):
        if model.architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(**config))  # type: ignore[no-any-return]
        return GptOssForCausalLM(GptOssConfig(**config, experts_implementation="eager"))  # type: ignore[no-any-return]


def _checkpoint_layers(core: Any) -> None:
    """Compute each layer's activations again in the backward pass.

    Nothing in a layer draws random numbers, so no generator has to be kept.
    """
    for layer in core.model.layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def _open_mesh(plan: MeshPlan, device_type: str, *, is_restartable: bool) -> DeviceMesh:
    if not is_restartable:
        return init_device_mesh(device_type, plan.sizes, mesh_dim_names=plan.axes)
    from resilience.comm.world import open_axes

    # With groups of the same names and in the same order as `take_groups` opens them.
    ranks = torch.arange(math.prod(plan.sizes)).view(plan.sizes)
    return DeviceMesh.from_group(
        open_axes(plan.sizes), device_type, ranks, mesh_dim_names=plan.axes
    )


def _shard(core: Any, mesh: DeviceMesh, trainer: TorchTrainer) -> None:
    """Shard every layer and the rest."""
    policy = MixedPrecisionPolicy()
    if trainer.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in core.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(core, mesh=mesh, mp_policy=policy)


def _restore_ties_and_buffers(core: Any, model: Model, device: torch.device) -> None:
    """Undo what `to_empty` did beside giving memory to parameters."""
    if model.tie_embeddings:
        core.lm_head.weight = core.model.embed_tokens.weight
    rotary = core.model.rotary_emb
    core.model.rotary_emb = type(rotary)(config=core.config).to(device)
    strays = [name for name, _ in core.named_buffers() if ".rotary_emb." not in f".{name}"]
    assert not strays, strays

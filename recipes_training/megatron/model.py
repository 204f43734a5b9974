"""Builds this rank's part of the model, its gradient buffers and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from recipes_training.megatron.library import RMSNorm, built_alone
from recipes_training.megatron.names import Place
from recipes_training.megatron.plan import MegatronPlan
from resilience.state.torch_state import make_zeros, materialise

_VALUES = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_UNFUSED = dict.fromkeys(
    (
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
    ),
    False,
)
"""The kernels that are not there without Transformer Engine and Apex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A flat part of one parameter that this rank's optimizer updates."""

    name: str
    """Of the parameter in this rank's model."""
    optimizer: Any
    main: Tensor
    """Its values in 32 bits."""
    begin: int
    """Where in the flat parameter it begins."""
    size: int
    """Values of the whole parameter."""
    is_expert: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """What one rank has of the model."""

    config: Any
    core: Any
    chunk: Any
    """The core with its gradient buffers."""
    optimizer: Any
    parts: tuple[Any, ...]
    """The optimizer's own: of the dense parameters, and of the experts'."""
    shards: tuple[Shard, ...]
    place: Place

    @property
    def bucket_groups(self) -> list[Any]:
        """Return what exchanges gradients and parameters together."""
        return [*self.chunk.bucket_groups, *self.chunk.expert_parallel_bucket_groups]


def build_model(plan: MegatronPlan) -> MegatronModel:
    """Build over the groups of `parallel_state`; needs no other rank."""
    config = _make_config(plan)
    model_parallel_cuda_manual_seed(plan.seed, force_reset_rng=True)
    core = GPTModel(
        config,
        _layer_specification(config),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **plan.model,
    )
    if config.bf16:
        core = core.bfloat16()
    _mark_experts(core)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(**plan.ddp), core)
    with built_alone():
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**_named(plan.optimizer)), [chunk], use_gloo_process_groups=False
        )
    parts = tuple(each for each in optimizer.chained_optimizers if not each.is_stub_optimizer)
    for each in parts:
        materialise(each.optimizer, has_frozen=True)
        for group in each.optimizer.param_groups:
            # Megatron leaves it to its scheduler that norms and biases do not decay.
            group["weight_decay"] = plan.optimizer["weight_decay"] * group["wd_mult"]
    config.no_sync_func = chunk.no_sync if plan.ddp["overlap_grad_reduce"] else None
    return MegatronModel(
        config=config,
        core=core,
        chunk=chunk,
        optimizer=optimizer,
        parts=parts,
        shards=tuple(sorted(_find_shards(core, parts), key=lambda each: each.name)),
        place=_find_place(config),
    )


def _make_config(plan: MegatronPlan) -> Any:
    config = TransformerConfig(
        **_named(plan.transformer),
        **_UNFUSED,
        # The values come from elsewhere. Without this step Megatron would not note, either, which
        # parameters are divided by tensor rank.
        init_method=_leave,
        output_layer_init_method=_leave,
        finalize_model_grads_func=finalize_model_grads,
    )
    for name, value in plan.yarn.items():
        setattr(config, name, value)
    return config


def _leave(tensor: Tensor) -> Tensor:
    return tensor


def _named(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with functions and types in place of their names."""
    return {
        key: _VALUES.get(value, value) if isinstance(value, str) else value
        for key, value in options.items()
    }


def _layer_specification(config: Any) -> Any:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, None, stage), layer_norm=RMSNorm
    )


def _mark_experts(core: Any) -> None:
    """Say of experts, which tensor ranks do not divide, what is to be made of their gradients.

    Tensor ranks give an expert other tokens. Megatron sums over them in the experts' own groups,
    which it has under expert parallelism alone, and there no rank has what another one counts.
    """
    for name, parameter in core.named_parameters():
        if ".local_experts." in name:
            setattr(parameter, "sequence_parallel", not is_expert(parameter))  # noqa: B010
            setattr(parameter, "tensor_model_parallel", is_expert(parameter))  # noqa: B010


def _find_shards(core: Any, parts: tuple[Any, ...]) -> Iterator[Shard]:
    names = {id(parameter): name for name, parameter in core.named_parameters()}
    for each in parts:
        pairs = [
            *zip(each.model_fp32_groups, each.shard_fp32_groups, strict=True),
            *zip(each.model_float16_groups, each.shard_fp32_from_float16_groups, strict=True),
        ]
        for models, mains in pairs:
            for model, main in zip(models, mains, strict=True):
                if main.is_cpu and main.untyped_storage().nbytes() != main.nbytes:
                    # In an fp32 model a part of it, which could not be moved into shared memory.
                    main.data = make_zeros(main)
                own = each._get_model_param_range_map(model)["param"]  # noqa: SLF001
                yield Shard(
                    name=names[id(model)],
                    optimizer=each.optimizer,
                    main=main,
                    begin=own.start,
                    size=model.numel(),
                    is_expert=is_expert(model),
                )


def is_expert(parameter: Tensor) -> bool:
    """Return whether ranks of other experts hold another parameter of the same name."""
    return not getattr(parameter, "allreduce", True)


def _find_place(config: Any) -> Place:
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    num_experts = config.num_moe_experts or 0
    return Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        first_layer=get_transformer_layer_offset(
            config, None, parallel_state.get_pipeline_model_parallel_rank()
        ),
        first_expert=num_experts // config.expert_model_parallel_size * expert_rank,
    )

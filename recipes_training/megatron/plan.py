"""What Megatron-Core is told of a job: keyword arguments by their own names.

Pure, and without Megatron: types and functions are given by name ("bfloat16",
"silu"), for the trainer to look up. Names are those of megatron-core 0.15 to
0.16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.job import TrainingJob
from launcher.job.workload import GptOssModel, MegatronTrainer, Model, Yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan:
    """Keyword arguments of each of Megatron's parts."""

    parallel_state: dict[str, Any]
    """Of parallel_state.initialize_model_parallel."""
    transformer: dict[str, Any]
    """Of TransformerConfig."""
    yarn: dict[str, Any]
    """Attributes to set on the TransformerConfig, which has no fields for them."""
    model: dict[str, Any]
    """Of GPTModel, beside its config and layer specification."""
    ddp: dict[str, Any]
    """Of DistributedDataParallelConfig."""
    optimizer: dict[str, Any]
    """Of OptimizerConfig."""
    micro_batch_size: int
    seq_length: int
    seed: int
    """Of what dropout draws."""


def plan_megatron(job: TrainingJob, trainer: MegatronTrainer) -> MegatronPlan:
    """Return what Megatron-Core is told of the job."""
    return MegatronPlan(
        parallel_state=_parallel_state(trainer),
        transformer=_transformer(job.model, trainer),
        yarn=_yarn(job.model),
        model=_model(job.model),
        ddp=_ddp(trainer),
        optimizer=_optimizer(trainer),
        micro_batch_size=trainer.micro_batch_size,
        seq_length=job.data.seq_length,
        seed=trainer.seed,
    )


def _parallel_state(trainer: MegatronTrainer) -> dict[str, Any]:
    return {
        **_degrees(trainer),
        "num_distributed_optimizer_instances": trainer.num_replicas,
    }


def _degrees(trainer: MegatronTrainer) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": trainer.tensor_parallel,
        "pipeline_model_parallel_size": trainer.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": trainer.virtual_pipeline,
        "context_parallel_size": trainer.context_parallel,
        "expert_model_parallel_size": trainer.expert_parallel,
        # Megatron divides no expert that has biases. Tensor ranks read other samples there.
        "expert_tensor_parallel_size": 1,
    }


def _transformer(model: Model, trainer: MegatronTrainer) -> dict[str, Any]:
    config: dict[str, Any] = {
        **_degrees(trainer),
        **_precision(trainer),
        "sequence_parallel": trainer.sequence_parallel,
        "pipeline_dtype": _precision(trainer)["params_dtype"],
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "init_method_std": model.init_std,
        "hidden_dropout": trainer.dropout,
        "attention_dropout": trainer.dropout,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
    }
    if trainer.activation_checkpointing:
        config |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if isinstance(model, GptOssModel):
        config |= _experts(model)
    return config


def _experts(model: GptOssModel) -> dict[str, Any]:
    return {
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        # Megatron counts the tokens before a token, the job's window the token itself as well.
        "window_size": (model.sliding_window - 1, 0),
        "window_attn_skip_freq": 2,
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.ffn_hidden_size,
        "moe_router_topk": model.num_experts_per_token,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": model.router_aux_loss_coef,
        "moe_token_dispatcher_type": "alltoall",
    }


def _rope_scaling(model: Model) -> Yarn | None:
    return model.rope_scaling if isinstance(model, GptOssModel) else None


def _yarn(model: Model) -> dict[str, Any]:
    if (yarn := _rope_scaling(model)) is None:
        return {}
    return {
        "yarn_rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original_context_length,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        # What YaRN takes by itself; megatron-core 0.15 has no None for it.
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": yarn.truncate,
    }


def _model(model: Model) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.context_length,
        "share_embeddings_and_output_weights": model.tie_embeddings,
        "position_embedding_type": "yarn" if _rope_scaling(model) else "rope",
        "rotary_base": model.rope_theta,
    }


def _ddp(trainer: MegatronTrainer) -> dict[str, Any]:
    return {
        "use_distributed_optimizer": True,
        "num_distributed_optimizer_instances": trainer.num_replicas,
        "overlap_grad_reduce": trainer.overlap_grad_reduce,
        "overlap_param_gather": trainer.overlap_param_gather,
        "grad_reduce_in_fp32": True,
    }


def _optimizer(trainer: MegatronTrainer) -> dict[str, Any]:
    options = trainer.optimizer
    return {
        **_precision(trainer),
        "optimizer": "adam",
        "use_distributed_optimizer": True,
        "overlap_param_gather": trainer.overlap_param_gather,
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "adam_eps": options.eps,
        # Megatron does not clip at 0.
        "clip_grad": options.clip_norm or 0.0,
    }


def _precision(trainer: MegatronTrainer) -> dict[str, Any]:
    is_bf16 = trainer.precision == "bf16"
    return {"bf16": is_bf16, "params_dtype": "bfloat16" if is_bf16 else "float32"}

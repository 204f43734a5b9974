"""Valid jobs of a very small model, with parts replaced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from launcher.job import Job

# 259 rows divide neither by 2 nor by 4: shards of unequal size are the usual case here.
LLAMA: dict[str, Any] = {
    "architecture": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 259, "context_length": 64,
    "rope_theta": 10000.0, "norm_eps": 1e-5, "init_std": 0.05, "tie_embeddings": False,
    "weights": None,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    "architecture": "gpt_oss",
    "num_experts": 4,
    "num_experts_per_token": 2,
    "router_aux_loss_coef": 0.01,
    "sliding_window": 8,
    "rope_scaling": {
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_context_length": 16,
    },
}
_OTHER_MODEL_VALUES: dict[str, Any] = {
    "hidden_size": 64, "num_heads": 2, "num_experts_per_token": 1, "context_length": 32,
    "tie_embeddings": True, "rope_scaling": None, "num_kv_heads": 1,
}  # fmt: skip
MODEL_KEYS = [
    (model, key)
    for model in (LLAMA, GPT_OSS)
    for key in model
    if key not in ("architecture", "weights")
]
"""Every key of either model that takes part in what it computes."""
_OPTIMIZER: dict[str, Any] = {
    "lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2, "decay_steps": None, "beta1": 0.9, "beta2": 0.95,
    "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0,
}  # fmt: skip
_TRAINER: dict[str, Any] = {
    "num_nodes": 1, "num_devices": 1, "max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2,
    "seed": 7, "precision": "fp32", "activation_checkpointing": False, "log_every_n_steps": 1,
    "save_checkpoint": True, "non_finite": "fail", "max_restarts": 0, "threads_per_worker": 1,
    "optimizer": _OPTIMIZER,
}  # fmt: skip
TORCH = {
    **_TRAINER,
    "kind": "torch",
    "sharding": "none",
    "num_replicas": None,
    "order_of_sums": "size",
}
MEGATRON = {
    **_TRAINER, "kind": "megatron", "tensor_parallel": 1, "pipeline_parallel": 1,
    "virtual_pipeline": None, "context_parallel": 1, "expert_parallel": 1,
    "sequence_parallel": False, "dropout": 0.0, "num_replicas": 1, "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}  # fmt: skip
_JOB: dict[str, Any] = {
    "recipe": {"name": "test/tiny", "version": 1, "schema": 1, "description": "A test"},
    "name": "tiny",
    "time_limit": None,
    "model": LLAMA,
    "trainer": TORCH,
    "data": {"kind": "stdlib_text", "seq_length": 16, "max_bytes": 20_000},
    "instance": {
        "type": "cpu",
        "accelerator": "cpu",
        "num_devices": 64,
        "num_efa": 0,
        "num_vcpus": 64,
        "memory_gib": 4096,
    },
    "resources": {"num_cpus": None, "memory_gib": None, "hugepages_2mi_mib": 0, "shm_gib": 0},
    "resilience": {},
    "env": {},
    "cluster": {"kind": "local", "secrets": {}},
}


def make_job(**parts: Any) -> Job:
    """Return a job; `trainer={"seed": 1}` replaces that key, other values replace a part."""
    content = copy.deepcopy(_JOB)
    # Features that this version knows are off unless a part says otherwise.
    features = Job.model_fields["resilience"].annotation
    assert features is not None
    content["resilience"] = dict.fromkeys(features.model_fields)
    _replace(content, parts)
    return Job.model_validate(content)


def write_job(folder: Path, job: Job) -> Path:
    """Write job.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    path.write_text(job.to_json())
    return path


def _replace(content: dict[str, Any], parts: dict[str, Any]) -> None:
    for key, value in parts.items():
        is_other_kind = isinstance(value, dict) and ("kind" in value or "architecture" in value)
        if isinstance(value, dict) and isinstance(content.get(key), dict) and not is_other_kind:
            _replace(content[key], value)
        else:
            content[key] = value


def with_other_value(model: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the model with another valid value of one key."""
    special = key in _OTHER_MODEL_VALUES
    return {**model, key: _OTHER_MODEL_VALUES[key] if special else model[key] * 2}

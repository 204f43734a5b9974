"""What a job trains: the model, the trainer's settings, and the data.

Field names are the recipe's YAML keys. Sizes are counts unless the name says
otherwise; steps are optimizer updates.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from launcher.job.fields import (
    AbsolutePath,
    Count,
    NotNegative,
    OneLine,
    Positive,
    Section,
    Share,
    Whole,
)
from resilience.settings import HttpUrl, Region

_S3_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")


def _check_s3_url(value: str) -> str:
    if not _S3_URL.fullmatch(value) or not value.isprintable():
        raise ValueError("allowed: s3://BUCKET or s3://BUCKET/PREFIX, of printable text")
    return value


class Transformer(Section):
    """The dimensions that every decoder-only transformer has."""

    num_layers: Count
    hidden_size: Count
    ffn_hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    context_length: Count
    rope_theta: Positive
    norm_eps: Positive
    init_std: Positive
    tie_embeddings: bool
    weights: AbsolutePath | None
    """A local folder that `from_pretrained` reads; null trains from random weights."""


class LlamaModel(Transformer):
    """Llama 3: grouped-query attention, SwiGLU, RMSNorm, no biases."""

    architecture: Literal["llama"]


class Yarn(Section):
    """YaRN rope scaling (arXiv 2309.00071), as GPT-OSS uses it."""

    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    truncate: bool
    original_context_length: Count


class GptOssModel(Transformer):
    """GPT-OSS: experts, alternating sliding windows, attention sinks, biases."""

    architecture: Literal["gpt_oss"]
    num_experts: Count
    num_experts_per_token: Count
    router_aux_loss_coef: NotNegative
    sliding_window: Count
    rope_scaling: Yarn | None


Model = Annotated[LlamaModel | GptOssModel, Field(discriminator="architecture")]


class Optimizer(Section):
    """AdamW with a cosine schedule: warm-up, decay to `min_lr`, then constant."""

    lr: Positive
    min_lr: NotNegative
    warmup_steps: Whole
    decay_steps: Count | None
    """Steps until `min_lr` is reached; null takes `max_steps`."""
    beta1: Share
    beta2: Share
    eps: Positive
    weight_decay: NotNegative
    clip_norm: Positive | None
    """Largest gradient norm over all ranks; null does not clip."""


class TrainerSettings(Section):
    """What every trainer has."""

    num_nodes: Count
    num_devices: Count
    """Workers a node; each has a device of its own where there are devices."""
    max_steps: Count
    global_batch_size: Count
    """Samples that one step consumes over all ranks."""
    micro_batch_size: Count
    """Samples of one forward and backward on one rank."""
    seed: Whole
    precision: Literal["fp32", "bf16"]
    activation_checkpointing: bool
    log_every_n_steps: Count
    save_checkpoint: bool
    """Write safetensors at the end of the run."""
    max_restarts: Whole
    """How often a node's workers are started again after a fault."""
    threads_per_worker: Count
    optimizer: Optimizer

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.num_nodes * self.num_devices


class TorchTrainer(TrainerSettings):
    """Plain PyTorch: DDP, or FSDP2 with full or hybrid sharding."""

    kind: Literal["torch"]
    sharding: Literal["none", "full", "hybrid"]
    """none is DDP; full is FSDP2 over all ranks; hybrid keeps `num_replicas` copies."""
    num_replicas: Count | None
    """Copies of the training state under hybrid sharding, null otherwise."""

    @property
    def model_parallel_size(self) -> int:
        """Return the ranks that work on one sample: always one here."""
        return 1

    @property
    def data_parallel_size(self) -> int:
        """Return the ranks that work on different samples."""
        return self.world_size

    @property
    def replicas(self) -> int:
        """Return the number of full copies of the training state."""
        if self.sharding == "none":
            return self.world_size
        return self.num_replicas or 1


class MegatronTrainer(TrainerSettings):
    """Megatron-Core: tensor, pipeline, context and expert parallelism."""

    kind: Literal["megatron"]
    tensor_parallel: Count
    pipeline_parallel: Count
    virtual_pipeline: Count | None
    context_parallel: Count
    expert_parallel: Count
    sequence_parallel: bool
    num_replicas: Count
    """Distributed-optimizer instances, each a full copy of the training state."""
    overlap_grad_reduce: bool
    overlap_param_gather: bool

    @property
    def model_parallel_size(self) -> int:
        """Return the ranks that work on one sample."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel_size(self) -> int:
        """Return the ranks that work on different samples, rounded down."""
        return self.world_size // self.model_parallel_size

    @property
    def replicas(self) -> int:
        """Return the number of full copies of the training state."""
        return self.num_replicas


Trainer = Annotated[TorchTrainer | MegatronTrainer, Field(discriminator="kind")]


class StdlibText(Section):
    """The Python standard library's own source files, tokenised by bytes."""

    kind: Literal["stdlib_text"]
    seq_length: Count
    max_bytes: Count
    """How much text to read, files in name order."""


class Jsonl(Section):
    """One JSON object a line, with the text under one key."""

    kind: Literal["jsonl"]
    seq_length: Count
    path: AbsolutePath
    text_key: OneLine
    tokenizer: Literal["bytes"] | AbsolutePath
    """`bytes`, or a folder that Hugging Face's AutoTokenizer reads."""


class S3Jsonl(Section):
    """Objects of JSON lines in a bucket of S3, in the order of their keys."""

    kind: Literal["s3_jsonl"]
    seq_length: Count
    url: Annotated[str, AfterValidator(_check_s3_url)]
    """s3://BUCKET/PREFIX: all objects whose keys begin so; end it with / to mean a folder."""
    text_key: OneLine
    tokenizer: Literal["bytes"] | AbsolutePath
    """`bytes`, or a folder that Hugging Face's AutoTokenizer reads."""
    endpoint: HttpUrl | None
    """URL of a server of S3's protocol that is not AWS's."""
    region: Region | None
    """Region of the bucket; null: us-east-1."""
    path_style: bool
    """Name the bucket in the path of the URL, not in its host."""


Data = Annotated[StdlibText | Jsonl | S3Jsonl, Field(discriminator="kind")]


class Instance(Section):
    """One node's hardware. Shipped entries follow AWS's published instance table."""

    type: OneLine
    accelerator: Literal["gpu", "neuron", "cpu"]
    num_devices: Count
    """Devices of a node; where the accelerator is cpu, the most workers it may have."""
    num_efa: Whole
    num_vcpus: Count
    memory_gib: Count


class Resources(Section):
    """What each node of the job asks of the cluster."""

    num_cpus: Count | None
    """null asks for no particular number."""
    memory_gib: Count | None
    """null asks for all of a Slurm node, and for no particular amount on Kubernetes."""
    hugepages_2mi_mib: Whole
    shm_gib: Whole
    """Size of /dev/shm; 0 leaves it as the cluster has it."""

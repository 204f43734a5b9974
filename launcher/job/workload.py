"""The workload of a job: model, trainer and data, or a program of a user's.

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
    matching,
)
from launcher.job.script.arguments import Arguments, ArgumentStyle, BooleanStyle, Texts
from resilience.settings import HttpUrl, Region

_S3_URL = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")


def _check_s3_url(value: str) -> str:
    if not _S3_URL.fullmatch(value) or not value.isprintable():
        raise ValueError("allowed: s3://BUCKET or s3://BUCKET/PREFIX, of printable text")
    return value


ModuleName = Annotated[
    str,
    AfterValidator(matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "a module's name, as torch.nn")),
]


class Transformer(Section):
    """The dimensions that every decoder-only transformer has."""

    num_layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width of the residual stream: numbers a token has between layers."""
    ffn_hidden_size: Count
    """Width inside the feed-forward block; of each expert where there are experts."""
    num_heads: Count
    """Attention heads of the queries in each layer."""
    num_kv_heads: Count
    """Attention heads of the keys and values in each layer; num_heads has to be a multiple of
    it."""
    head_dim: Count
    """Width of one attention head."""
    vocab_size: Count
    """Rows of the embedding: at least the tokenizer's tokens."""
    context_length: Count
    """Most tokens of one sample: data.seq_length may not be more."""
    rope_theta: Positive
    """Base of the rotary position embedding's frequencies."""
    norm_eps: Positive
    """Number added to the mean square in RMSNorm before its root is taken."""
    init_std: Positive
    """Standard deviation of the random weights that training begins with."""
    tie_embeddings: bool
    """Whether the input embedding is the output layer, too."""
    weights: AbsolutePath | None
    """Local folder in Hugging Face's layout that training begins from; null begins from random
    weights."""


class LlamaModel(Transformer):
    """Llama 3: grouped-query attention, SwiGLU, RMSNorm, no biases."""

    architecture: Literal["llama"]
    """llama: the layers are those of Llama 3."""


class Yarn(Section):
    """YaRN rope scaling (arXiv 2309.00071), as GPT-OSS uses it."""

    factor: Positive
    """How many times longer the context becomes than original_context_length."""
    beta_fast: Positive
    """Dimensions that rotate more often than this over the original context keep their
    frequency."""
    beta_slow: Positive
    """Dimensions that rotate less often than this over the original context are slowed by `factor`;
    those between are blended."""
    truncate: bool
    """Whether the bounds of the blended dimensions are rounded to whole dimensions."""
    original_context_length: Count
    """Tokens of context before the scaling."""


class GptOssModel(Transformer):
    """GPT-OSS: experts, alternating sliding windows, attention sinks, biases."""

    architecture: Literal["gpt_oss"]
    """gpt_oss: the layers are those of GPT-OSS."""
    num_experts: Count
    """Experts in each layer."""
    num_experts_per_token: Count
    """Experts that each token is sent to; at most num_experts."""
    router_aux_loss_coef: NotNegative
    """Weight of the loss that balances the experts' load; 0 has no such loss."""
    sliding_window: Count
    """Tokens, the own one included, that every other layer attends to."""
    rope_scaling: Yarn | None
    """YaRN scaling of the rotary embedding, for a longer context; null scales nothing."""


Model = Annotated[LlamaModel | GptOssModel, Field(discriminator="architecture")]


class Optimizer(Section):
    """AdamW with a cosine schedule: warm-up, decay to `min_lr`, then constant."""

    lr: Positive
    """Highest learning rate, reached when the warm-up ends."""
    min_lr: NotNegative
    """Learning rate at the end of the decay and after it; at most `lr`."""
    warmup_steps: Whole
    """Steps over which the learning rate rises to `lr`."""
    decay_steps: Count | None
    """Steps, the warm-up included, until `min_lr` is reached; null takes trainer.max_steps."""
    beta1: Share
    """Share of the first moment, the mean of gradients, that a step keeps."""
    beta2: Share
    """Share of the second moment, the mean of squared gradients, that a step keeps."""
    eps: Positive
    """Number added to the second moment's root, by which Adam divides."""
    weight_decay: NotNegative
    """Decay of the weights, in AdamW's form; norms and biases do not decay."""
    clip_norm: Positive | None
    """Largest norm of the gradients over all ranks; null does not clip."""


class TrainerSettings(Section):
    """Settings of every trainer, that of a script among them."""

    num_nodes: Count
    """Nodes that train; nodes that stand by come on top."""
    num_devices: Count
    """Workers on each node, each with a device of its own where there are devices; of a script the
    devices, and trainer.processes_per_node says how many processes have them."""
    max_steps: Count | None
    """Optimizer updates until the run is over."""
    max_restarts: Whole
    """Restarts of the workers of all nodes after faults, in the whole run; without
    checkpoints each start begins at step 0."""
    threads_per_worker: Count
    """CPU threads of each worker: OMP_NUM_THREADS, and torch's own."""

    @property
    def workers_per_node(self) -> int:
        """Return the processes that an agent starts on each node."""
        return self.num_devices

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.num_nodes * self.workers_per_node

    @property
    def num_shards(self) -> int | None:
        """Return the ranks that together hold one copy; None where each rank holds a whole one."""
        return None

    @property
    def num_stages(self) -> int:
        """Return the pipeline stages, each of which has ranks that follow each other."""
        return 1

    @property
    def steps_between_events(self) -> int:
        """Return how many steps the run takes from one reported step to the next."""
        return 1


class ScriptTrainer(TrainerSettings):
    """A training program of a user's, as it is."""

    kind: Literal["script"]
    """script: the run is trained by a program of your own."""
    max_steps: Count | None
    """Steps that the program takes, for the display alone; null: not known."""
    entry: OneLine
    """Program to start: a file of Python (train.py), a module (-m train.main), or an executable
    (accelerate)."""
    arguments: Arguments
    """Arguments of the program by name, {lr: 3e-4}, or a list of its words as they are. A section
    in it is a name with a dot, a list several words, and null leaves an argument out. {run_dir} is
    the run's folder."""
    argument_style: ArgumentStyle
    """Form of an argument that has a name."""
    boolean_style: BooleanStyle
    """flag: --key where it is true, and nothing where it is false; value: --key true, as always in
    the style key=value."""
    folder: AbsolutePath | None
    """Absolute path of the program's folder on the nodes; null is the folder in which the launcher
    is called, on this machine alone."""
    python: AbsolutePath | None
    """Interpreter of the program on the nodes, such as /opt/venv/bin/python; null is the cluster's,
    whose processes begin with what trainer.preload has imported."""
    processes_per_node: Count | None
    """Processes of each node; null is num_devices, and 1 with environment none."""
    environment: Literal["torchrun", "none"]
    """torchrun: each process has the variables that torchrun sets. none: one process a node, which
    starts what it likes, and {node_rank}, {num_nodes}, {head_addr} and {head_port} in its arguments
    are filled in."""
    progress: Texts
    """Patterns of steps in the output of the program: names of known programs, or regular
    expressions with a group `step`; null finds none."""
    hang_deadline_s: Positive | None
    """Seconds without a step after which all is started again; of a program that tells no steps,
    without output and processor time. null never does."""
    preload: tuple[ModuleName, ...]
    """Modules that are imported once for the processes of a node, with python null."""

    @property
    def workers_per_node(self) -> int:
        """Return the processes that an agent starts on each node."""
        return self.processes_per_node or (1 if self.environment == "none" else self.num_devices)

    @property
    def is_executable(self) -> bool:
        """Return whether the entry is a program of its own, which no Python reads."""
        return not (self.module or self.entry.endswith(".py"))

    @property
    def module(self) -> str | None:
        """Return the module that is the entry, None where that is a file."""
        return self.entry.removeprefix("-m ").strip() if self.entry.startswith("-m ") else None


class OwnTrainerSettings(TrainerSettings):
    """Further settings of a trainer of ours."""

    max_steps: Count
    """Optimizer updates until the run is over."""
    global_batch_size: Count
    """Samples that one step consumes over all ranks; a multiple of micro_batch_size, which under
    Megatron every data-parallel rank has as many times."""
    micro_batch_size: Count
    """Samples of one forward and backward on one rank."""
    seed: Whole
    """Seed of the weights, the order of the data and all other random numbers."""
    precision: Literal["fp32", "bf16"]
    """Number format that the model computes in; under torch bf16 needs an accelerator."""
    activation_checkpointing: bool
    """Whether each layer's activations are computed again in the backward pass, which takes time
    and saves memory."""
    log_every_n_steps: Count
    """Report loss and time of every nth step, of the first and of the last."""
    save_checkpoint: bool
    """Whether the weights are written as safetensors at the end of the run."""
    non_finite: Literal["fail", "skip"]
    """What is done about a step whose loss or gradient norm is not finite, and is not when it is
    run again: fail ends the run, skip goes on without the step's update."""
    optimizer: Optimizer
    """AdamW and its learning rates."""

    @property
    def steps_between_events(self) -> int:
        """Return how many steps the run takes from one reported step to the next."""
        return self.log_every_n_steps

    def at_size(self, num_nodes: int) -> OwnTrainerSettings:
        """Return these settings on another number of nodes."""
        return self.model_copy(update={"num_nodes": num_nodes})

    @property
    def num_micro_batches(self) -> int:
        """Return the micro batches of a step over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def model_parallel_size(self) -> int:
        """Return the ranks that work on one sample."""
        return 1

    def find_batch_problem(self, data_size: int) -> str | None:
        """Return why so many ranks cannot divide a global batch, None where they can."""
        batch, micro = self.global_batch_size, self.micro_batch_size
        if batch % micro:
            return (
                f"trainer.global_batch_size {batch} is no multiple of trainer.micro_batch_size "
                f"{micro}"
            )
        if self.num_micro_batches < data_size:
            return (
                f"trainer.global_batch_size {batch} has {self.num_micro_batches} micro batches of "
                f"trainer.micro_batch_size {micro}, fewer than the {data_size} data-parallel "
                f"ranks; allowed: at least {micro * data_size}"
            )
        return None

    @property
    def data_parallel_size(self) -> int:
        """Return the ranks that work on different samples, rounded down."""
        return self.world_size // self.model_parallel_size


class TorchTrainer(OwnTrainerSettings):
    """Plain PyTorch: DDP, or FSDP2 with full or hybrid sharding."""

    kind: Literal["torch"]
    """torch: the run is trained by plain PyTorch."""
    sharding: Literal["none", "full", "hybrid"]
    """none is DDP; full is FSDP2 over all ranks; hybrid is FSDP2 with `num_replicas` copies of the
    training state."""
    num_replicas: Count | None
    """Copies of the training state with hybrid sharding; null with none and full."""
    order_of_sums: Literal["size", "fixed"]
    """In which order gradients are added up: size is torch's, which depends on the number of
    workers; fixed gives the same bits at any number of them, and takes sharding none."""

    def at_size(self, num_nodes: int) -> TorchTrainer:
        """Return these settings on another number of nodes, with as many ranks to a copy."""
        changes = {"num_nodes": num_nodes}
        if self.sharding == "hybrid":
            changes["num_replicas"] = num_nodes * self.num_devices // (self.num_shards or 1)
        return self.model_copy(update=changes)

    @property
    def replicas(self) -> int:
        """Return the number of full copies of the training state."""
        if self.sharding == "none":
            return self.world_size
        return self.num_replicas or 1

    @property
    def num_shards(self) -> int | None:
        """Return the ranks that together hold one copy; None where each rank holds a whole one."""
        return None if self.sharding == "none" else self.world_size // self.replicas


class MegatronTrainer(OwnTrainerSettings):
    """Megatron-Core: tensor, pipeline, context and expert parallelism."""

    kind: Literal["megatron"]
    """megatron: the run is trained by Megatron-Core."""
    tensor_parallel: Count
    """Ranks that share each layer's matrices; model.num_heads and num_kv_heads have to divide by
    it."""
    pipeline_parallel: Count
    """Stages that the layers are divided over, each on ranks of its own."""
    virtual_pipeline: Count | None
    """Model chunks of each pipeline stage, which interleave; null does not interleave."""
    context_parallel: Count
    """Ranks that share each sample's tokens."""
    expert_parallel: Count
    """Ranks that share the experts; 1 for a model without experts."""
    sequence_parallel: bool
    """Whether tensor-parallel ranks also split norms and dropout along the sequence, which saves
    memory."""
    dropout: Share
    """Share of the values that dropout leaves out, of attention and of what is added to the
    residual; 0 for none."""
    num_replicas: Count
    """Distributed-optimizer instances, each a full copy of the training state."""
    overlap_grad_reduce: bool
    """Whether gradients are reduced while the backward pass computes."""
    overlap_param_gather: bool
    """Whether parameters are gathered while the forward pass computes."""

    @property
    def model_parallel_size(self) -> int:
        """Return the ranks that work on one sample."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def replicas(self) -> int:
        """Return the number of full copies of the training state."""
        return self.num_replicas

    def find_batch_problem(self, data_size: int) -> str | None:
        """Return why so many ranks cannot divide a global batch: Megatron's have as many each."""
        samples = self.micro_batch_size * data_size
        if self.global_batch_size % samples:
            return (
                f"trainer.global_batch_size {self.global_batch_size} is no multiple of "
                f"trainer.micro_batch_size {self.micro_batch_size} x data-parallel size "
                f"{data_size} = {samples}"
            )
        return None

    @property
    def num_shards(self) -> int:
        """Return the ranks that together hold one copy of the training state."""
        return self.world_size // self.num_replicas

    @property
    def num_stages(self) -> int:
        """Return the pipeline stages, each of which has ranks that follow each other."""
        return self.pipeline_parallel


Trainer = Annotated[TorchTrainer | MegatronTrainer, Field(discriminator="kind")]
"""A trainer of ours."""
AnyTrainer = Annotated[TorchTrainer | MegatronTrainer | ScriptTrainer, Field(discriminator="kind")]


NUM_BYTE_TOKENS = 257
"""Of text as bytes: one for each byte, and the end of a text."""


class StdlibText(Section):
    """The Python standard library's own source files, tokenised by bytes."""

    kind: Literal["stdlib_text"]
    """stdlib_text: the data is the Python standard library's own source text, found on every
    machine."""
    seq_length: Count
    """Tokens of one sample; at most model.context_length."""
    max_bytes: Count
    """Bytes of text to read, files in name order; all of it is held in memory."""


class Jsonl(Section):
    """One JSON object a line, with the text under one key."""

    kind: Literal["jsonl"]
    """jsonl: the data is a file with one JSON object a line."""
    seq_length: Count
    """Tokens of one sample; at most model.context_length."""
    path: AbsolutePath
    """The file, at the same absolute path on every node."""
    text_key: OneLine
    """Key of each JSON object that holds the text."""
    tokenizer: Literal["bytes"] | AbsolutePath
    """`bytes`, or a local folder that Hugging Face's AutoTokenizer reads."""


class S3Jsonl(Section):
    """Objects of JSON lines in a bucket of S3, in the order of their keys."""

    kind: Literal["s3_jsonl"]
    """s3_jsonl: the data is objects in S3 with one JSON object a line."""
    seq_length: Count
    """Tokens of one sample; at most model.context_length."""
    url: Annotated[str, AfterValidator(_check_s3_url)]
    """s3://BUCKET/PREFIX: all objects whose keys begin so; end it with / to mean a folder."""
    text_key: OneLine
    """Key of each JSON object that holds the text."""
    tokenizer: Literal["bytes"] | AbsolutePath
    """`bytes`, or a local folder that Hugging Face's AutoTokenizer reads."""
    endpoint: HttpUrl | None
    """URL of a server of S3's protocol that is not AWS's; null is AWS."""
    region: Region | None
    """Region of the bucket; null: us-east-1."""
    path_style: bool
    """Whether the bucket is named in the URL's path instead of its host, as many servers other than
    AWS's need."""


Data = Annotated[StdlibText | Jsonl | S3Jsonl, Field(discriminator="kind")]


class Instance(Section):
    """One node's hardware. Shipped entries follow AWS's published instance table."""

    type: OneLine
    """Instance type, such as ml.p5.48xlarge: the name of its file in conf/instance/."""
    accelerator: Literal["gpu", "neuron", "cpu"]
    """Sort of devices; no trainer supports neuron."""
    num_devices: Count
    """Devices of a node; where the accelerator is cpu, the most workers it may have."""
    num_efa: Whole
    """EFA network devices of a node."""
    num_vcpus: Count
    """Virtual CPUs of a node."""
    memory_gib: Count
    """Memory of a node in GiB, that of its devices left out."""


class Resources(Section):
    """What each node of the job asks of the cluster."""

    num_cpus: Count | None
    """CPUs of a node; null asks for no particular number."""
    memory_gib: Count | None
    """Memory of a node in GiB; null asks for all of a Slurm node, and on Kubernetes for none in
    particular, or what the processes need where huge pages are asked for."""
    hugepages_2mi_mib: Whole
    """Memory of a node in huge pages of 2 MiB, in MiB and a multiple of 2, as EFA may need; 0 asks
    for none."""
    shm_gib: Whole
    """Size of /dev/shm in GiB; 0 leaves it as the cluster has it."""

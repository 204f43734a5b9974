"""Rules that join two or more fields of a job.

Each rule yields a message that names the fields, their values and what is
allowed. All of them run, so that a person sees every problem at once.
Nothing here reads anything but the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from launcher.job.cluster_rules import k8s_rules, slurm_rules, variable_keys
from launcher.job.content import JobContent, TrainingContent
from launcher.job.fields import shown
from launcher.job.grace import grace_rules
from launcher.job.mmap_rules import mmap_rules, num_positions
from launcher.job.recovery_rules import fault_rules, recovery_rules
from launcher.job.script.rules import script_rules
from launcher.job.tiered_memory import WORKER_MEMORY_GIB
from launcher.job.tiered_rules import tiered_rules
from launcher.job.workload import (
    NUM_BYTE_TOKENS,
    GptOssModel,
    LlamaModel,
    MegatronTrainer,
    ScriptTrainer,
    TorchTrainer,
)
from launcher.secrets import held_secrets

Rule = Callable[[JobContent], Iterator[str]]


def broken_rules(job: JobContent) -> list[str]:
    """Return a message for every rule that the job breaks; none means it is sound."""
    if missing := list(_missing_sections(job)):
        return missing
    return [message for rule in _RULES for message in rule(job)]


def _missing_sections(job: JobContent) -> Iterator[str]:
    if isinstance(job.trainer, ScriptTrainer):
        return
    for name in ("model", "data"):
        if getattr(job, name) is None:
            yield f"no value for {name!r}; set it in the recipe or on the command line"


def _of_ours(rule: Callable[[TrainingContent], Iterator[str]]) -> Rule:
    """Return a rule that holds for jobs that a trainer of ours trains."""

    def check(job: JobContent) -> Iterator[str]:
        training = job.training
        return iter(()) if training is None else rule(training)

    return check


def _model_dimensions(job: TrainingContent) -> Iterator[str]:
    model = job.model
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_heads {model.num_heads} is no multiple of "
            f"model.num_kv_heads {model.num_kv_heads}"
        )
    if model.head_dim % 2:
        yield (
            f"model.head_dim {model.head_dim} is odd, and rotary position embeddings turn pairs of "
            "numbers; allowed: an even number"
        )
    is_torch_llama = isinstance(model, LlamaModel) and isinstance(job.trainer, TorchTrainer)
    if is_torch_llama and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size {model.hidden_size} is no multiple of model.num_heads "
            f"{model.num_heads}, which Hugging Face's Llama asks for (trainer=torch)"
        )
    tokenizer = getattr(job.data, "tokenizer", "bytes")
    if tokenizer == "bytes" and model.vocab_size < NUM_BYTE_TOKENS:
        yield (
            f"model.vocab_size {model.vocab_size} is too few for text as bytes; allowed: at least "
            f"{NUM_BYTE_TOKENS}"
        )
    if job.data.seq_length > model.context_length:
        yield (
            f"data.seq_length {job.data.seq_length} is more than "
            f"model.context_length {model.context_length}"
        )
    if isinstance(model, GptOssModel) and model.num_experts_per_token > model.num_experts:
        yield (
            f"model.num_experts_per_token {model.num_experts_per_token} is more than "
            f"model.num_experts {model.num_experts}"
        )


def _world(job: TrainingContent) -> Iterator[str]:
    trainer = job.trainer
    if trainer.world_size % trainer.model_parallel_size:
        assert isinstance(trainer, MegatronTrainer)
        yield (
            f"world size {trainer.world_size} (trainer.num_nodes {trainer.num_nodes} x "
            f"trainer.num_devices {trainer.num_devices}) does not divide by "
            f"tensor_parallel {trainer.tensor_parallel} x pipeline_parallel "
            f"{trainer.pipeline_parallel} x context_parallel {trainer.context_parallel} = "
            f"{trainer.model_parallel_size}; {_nodes_hint(trainer)}"
        )
        return
    yield from _batches(job)
    yield from _replicas(job)


def _nodes_hint(trainer: MegatronTrainer) -> str:
    """Return the remedy for a world size that its model-parallel size does not divide."""
    parallel = trainer.model_parallel_size
    nodes = parallel // math.gcd(parallel, trainer.num_devices)
    return f"set trainer.num_nodes to a multiple of {nodes}, or change a degree"


def _batches(job: TrainingContent) -> Iterator[str]:
    if problem := job.trainer.find_batch_problem(job.trainer.data_parallel_size):
        yield problem


def _replicas(job: TrainingContent) -> Iterator[str]:
    trainer = job.trainer
    if isinstance(trainer, TorchTrainer) and (trainer.num_replicas is None) == (
        trainer.sharding == "hybrid"
    ):
        yield (
            f"trainer.num_replicas {shown(trainer.num_replicas)} does not fit trainer.sharding "
            f"{trainer.sharding!r}; hybrid needs a number, none and full take null"
        )
        return
    if (
        isinstance(trainer, TorchTrainer)
        and trainer.order_of_sums == "fixed"
        and trainer.sharding != "none"
    ):
        yield (
            f"trainer.order_of_sums 'fixed' does not fit trainer.sharding {trainer.sharding!r}, "
            "which adds up within a copy before anything else; it takes none"
        )
        return
    if trainer.data_parallel_size % trainer.replicas:
        yield (
            f"data-parallel size {trainer.data_parallel_size} does not divide by "
            f"trainer.num_replicas {trainer.replicas}; allowed: a divisor of "
            f"{trainer.data_parallel_size}"
        )
    if job.resilience.checkpointless and trainer.replicas < 2 and not _may_have_one_copy(job):
        yield (
            f"trainer.num_replicas {trainer.replicas} is too few for resilience.checkpointless; "
            "recovery without a checkpoint needs at least 2 copies of the training state"
            f"{_ONE_COPY if job.resilience.elastic else ''}"
        )


_ONE_COPY = ", or resilience.tiered, or resilience.elastic.may_lose_steps=true"


def _may_have_one_copy(job: TrainingContent) -> bool:
    """Return whether a run that shrinks goes on with the one copy that is left."""
    elastic = job.resilience.elastic
    return elastic is not None and (elastic.may_lose_steps or job.resilience.tiered is not None)


def _megatron(job: TrainingContent) -> Iterator[str]:
    trainer, model = job.trainer, job.model
    if not isinstance(trainer, MegatronTrainer):
        return
    degree = trainer.tensor_parallel
    if model.vocab_size % degree:
        yield (
            f"model.vocab_size {model.vocab_size} does not divide by trainer.tensor_parallel "
            f"{degree}; set it to a multiple, at least as many as the tokenizer has tokens"
        )
    # Experts are whole on every rank.
    if not isinstance(model, GptOssModel) and model.ffn_hidden_size % degree:
        yield (
            f"model.ffn_hidden_size {model.ffn_hidden_size} does not divide by "
            f"trainer.tensor_parallel {degree}"
        )
    for name, value in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if value % degree:
            yield (
                f"model.{name} {value} does not divide by trainer.tensor_parallel {degree}; "
                f"allowed: {_divisors(math.gcd(model.num_heads, model.num_kv_heads))}"
            )
    stages = trainer.pipeline_parallel * (trainer.virtual_pipeline or 1)
    if model.num_layers % stages:
        yield (
            f"model.num_layers {model.num_layers} does not divide by trainer.pipeline_parallel "
            f"{trainer.pipeline_parallel} x trainer.virtual_pipeline "
            f"{trainer.virtual_pipeline or 1} = {stages}"
        )
    if model.tie_embeddings and trainer.pipeline_parallel > 1:
        yield (
            "model.tie_embeddings true shares a matrix between the first and the last stage, which "
            f"trainer.pipeline_parallel {trainer.pipeline_parallel} keeps apart; set it to false, "
            "or pipeline_parallel to 1"
        )
    if trainer.virtual_pipeline and trainer.pipeline_parallel == 1:
        yield (
            f"trainer.virtual_pipeline {trainer.virtual_pipeline} needs "
            "trainer.pipeline_parallel of at least 2; set it to null"
        )
    yield from _experts(job, trainer)
    yield from _sequence(job, trainer)


def _experts(job: TrainingContent, trainer: MegatronTrainer) -> Iterator[str]:
    degree = trainer.expert_parallel
    if isinstance(job.model, LlamaModel):
        if degree != 1:
            yield (
                f"trainer.expert_parallel {degree} does not fit model.architecture 'llama', "
                "which has no experts; set it to 1"
            )
        return
    if job.model.num_experts % degree:
        yield (
            f"model.num_experts {job.model.num_experts} does not divide by "
            f"trainer.expert_parallel {degree}"
        )
    if trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        yield (
            f"trainer.tensor_parallel {trainer.tensor_parallel} of a model with experts needs "
            "trainer.sequence_parallel, which is false; set it to true, or tensor_parallel to 1"
        )
    # Megatron divides no expert by tensor rank: all ranks of a stage hold experts of their own.
    ranks = trainer.world_size // trainer.pipeline_parallel
    if ranks % (degree * trainer.num_replicas):
        yield (
            f"the number of ranks of a stage, {ranks}, does not divide by "
            f"trainer.expert_parallel {degree} x trainer.num_replicas {trainer.num_replicas}"
        )


def _sequence(job: TrainingContent, trainer: MegatronTrainer) -> Iterator[str]:
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        yield (
            "trainer.sequence_parallel true needs trainer.tensor_parallel of at least 2, which is "
            "1; set it to false"
        )
    length, context = job.data.seq_length, trainer.context_parallel
    # With context parallelism each rank takes one chunk from the front and one from the back.
    chunks = 2 * context if context > 1 else 1
    if length % chunks:
        yield (
            f"data.seq_length {length} does not divide by 2 x trainer.context_parallel "
            f"{context} = {chunks}"
        )
    elif trainer.sequence_parallel and (length // context) % trainer.tensor_parallel:
        yield (
            f"data.seq_length {length} / trainer.context_parallel {context} does not divide by "
            f"trainer.tensor_parallel {trainer.tensor_parallel}, which "
            "trainer.sequence_parallel asks for"
        )


def _schedule(job: TrainingContent) -> Iterator[str]:
    optimizer = job.trainer.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"trainer.optimizer.min_lr {optimizer.min_lr} is more than "
            f"trainer.optimizer.lr {optimizer.lr}"
        )
    # A run that is cut short within its warm-up, to try something, is no mistake.
    if optimizer.decay_steps and optimizer.warmup_steps >= optimizer.decay_steps:
        yield (
            f"trainer.optimizer.warmup_steps {optimizer.warmup_steps} is not less than "
            f"trainer.optimizer.decay_steps {optimizer.decay_steps}"
        )


def _hardware(job: JobContent) -> Iterator[str]:
    trainer, instance = job.trainer, job.instance
    if trainer.num_devices > instance.num_devices:
        yield (
            f"trainer.num_devices {trainer.num_devices} is more than the "
            f"{instance.num_devices} devices of instance {instance.type!r}"
        )
    is_bf16 = isinstance(trainer, TorchTrainer) and trainer.precision == "bf16"
    if is_bf16 and instance.accelerator == "cpu":
        yield (
            f"trainer.precision 'bf16' needs an accelerator, and instance {instance.type!r} "
            "has none; allowed here: 'fp32'"
        )
    if instance.accelerator == "neuron":
        yield (
            f"instance {instance.type!r} has Neuron devices, which no trainer here supports; "
            "choose a GPU instance"
        )
    if job.env.get("FI_PROVIDER") == "efa" and instance.num_efa == 0:
        yield (
            f"env.FI_PROVIDER 'efa' needs EFA devices, and instance {instance.type!r} has none; "
            "remove it, or choose an instance with EFA"
        )


def _memory(job: JobContent) -> Iterator[str]:
    resources, instance = job.resources, job.instance
    workers, spares = job.trainer.workers_per_node, job.resilience.spares_per_node
    processes = f"{workers} workers and {spares} spares" if spares else f"{workers} workers"
    needed_shm = math.ceil(job.resilience.shm_mib(workers, num_positions(job)) / 1024)
    if resources.shm_gib < needed_shm:
        yield (
            f"resources.shm_gib {resources.shm_gib} is less than the {needed_shm} GiB that "
            f"{workers} workers with {', '.join(job.resilience.names())} need on a node"
        )
    hugepages_gib = math.ceil(resources.hugepages_2mi_mib / 1024)
    if resources.hugepages_2mi_mib % 2:
        yield (
            f"resources.hugepages_2mi_mib {resources.hugepages_2mi_mib} is no multiple of 2, "
            "the size of a page"
        )
    if resources.memory_gib is None:
        if resources.shm_gib + hugepages_gib > instance.memory_gib:
            yield (
                f"resources.shm_gib {resources.shm_gib} and resources.hugepages_2mi_mib "
                f"{resources.hugepages_2mi_mib} are more than the {instance.memory_gib} GiB of "
                f"instance {instance.type!r}"
            )
        return
    if resources.memory_gib + hugepages_gib > instance.memory_gib:
        yield (
            f"resources.memory_gib {resources.memory_gib} with {hugepages_gib} GiB of huge pages "
            f"is more than the {instance.memory_gib} GiB of instance {instance.type!r}"
        )
    # /dev/shm is memory of the pod, so its size counts towards the request.
    needed = resources.shm_gib + (workers + spares) * WORKER_MEMORY_GIB
    if resources.memory_gib < needed:
        yield (
            f"resources.memory_gib {resources.memory_gib} is less than resources.shm_gib "
            f"{resources.shm_gib} and {WORKER_MEMORY_GIB} GiB for each of {processes} = {needed}"
        )


def _cpus(job: JobContent) -> Iterator[str]:
    if (cpus := job.resources.num_cpus) and cpus > job.instance.num_vcpus:
        yield (
            f"resources.num_cpus {cpus} is more than the {job.instance.num_vcpus} of "
            f"instance {job.instance.type!r}"
        )


def _elastic(job: TrainingContent) -> Iterator[str]:
    elastic, nodes = job.resilience.elastic, job.trainer.num_nodes
    if elastic is None:
        return
    low, high = elastic.nodes_min, elastic.nodes_max
    where = "resilience.elastic"
    if low > high:
        yield (
            f"{where}.nodes_min {low} is more than {where}.nodes_max {high}; allowed: at most "
            f"{high}"
        )
        return
    if not low <= nodes <= high:
        yield (
            f"trainer.num_nodes {nodes} is outside {where}.nodes_min {low} to nodes_max {high}; "
            "set it within them, or change them"
        )
    if elastic.nodes_step and elastic.nodes_allowed:
        yield (
            f"{where}.nodes_step {elastic.nodes_step} and {where}.nodes_allowed "
            f"{list(elastic.nodes_allowed)} exclude each other; set one of them to null"
        )
        return
    if elastic.nodes_step and (high - low) % elastic.nodes_step:
        yield (
            f"{where}.nodes_step {elastic.nodes_step} does not lead from nodes_min {low} to "
            f"nodes_max {high}; allowed: {_divisors(high - low)}"
        )
    sizes = elastic.sizes
    if outside := [size for size in sizes if not low <= size <= high]:
        yield (
            f"{where}.nodes_allowed {outside} is outside nodes_min {low} to nodes_max {high}; "
            "leave it out, or change them"
        )
    if twice := sorted({size for size in sizes if sizes.count(size) > 1}):
        yield (
            f"{where}.nodes_allowed {list(elastic.nodes_allowed or ())} names "
            f"{', '.join(map(str, twice))} more than once; allowed: each size once, as "
            f"{sorted(set(sizes))}"
        )
    if low not in sizes and not outside:
        yield (
            f"{where}.nodes_min {low} is none of {where}.nodes_allowed {list(sizes)}; set it to "
            f"{min(sizes)}"
        )
    if nodes not in sizes and low <= nodes <= high:
        yield f"trainer.num_nodes {nodes} is none of the sizes {list(sizes)} of {where}"
    if not _problem_at(job, nodes):
        yield from _elastic_sizes(job, [size for size in sizes if size != nodes])


def _elastic_sizes(job: TrainingContent, sizes: list[int]) -> Iterator[str]:
    """Hold every other size that the job may have against the rules of parallelism."""
    broken = {size: problem for size in sizes if (problem := _problem_at(job, size))}
    if not broken:
        return
    # What mends the largest mends the others.
    size = max(broken)
    problem = broken[size]
    elastic = job.resilience.elastic
    assert elastic
    fitting = [each for each in elastic.sizes if each not in broken]
    yield (
        f"resilience.elastic allows {size} nodes, and there {problem}; sizes that fit: "
        f"{', '.join(map(str, fitting))}, to be set as resilience.elastic.nodes_allowed"
    )


def _problem_at(job: TrainingContent, num_nodes: int) -> str | None:
    trainer = job.trainer.at_size(num_nodes)
    is_hybrid = isinstance(trainer, TorchTrainer) and trainer.sharding == "hybrid"
    if is_hybrid and trainer.world_size % (shards := job.trainer.num_shards or 1):
        return f"{trainer.world_size} ranks do not divide by the {shards} that hold a copy"
    return next(_world(job.model_copy(update={"trainer": trainer})), None)


def _environment(job: JobContent) -> Iterator[str]:
    for key in variable_keys(job):
        name = key.rpartition(".")[2]
        if name in _TAKEN_VARIABLES or name.startswith(_TAKEN_BEGINNINGS):
            yield (
                f"{key} is a variable of the shell, of Slurm, of the agent or of the rendered "
                "scripts themselves; choose another name"
            )


# Of Slurm's, those that it sets itself: SLURM_CPU_BIND and the like are options of srun.
_TAKEN_BEGINNINGS = (
    "LAUNCHER_", "RESILIENCE_", "TORCHELASTIC_", "SLURMD_", "SLURM_ARRAY_", "SLURM_JOB",
    "SLURM_NODE", "SLURM_NTASKS", "SLURM_STEP", "SLURM_SUBMIT_", "SLURM_TOPOLOGY_",
)  # fmt: skip
# Read-only in bash, set by Slurm, set by the agent for each worker, or used by templates/.
_TAKEN_VARIABLES = frozenset(
    """
    BASHOPTS BASH_VERSINFO EUID PPID SHELLOPTS UID IFS
    SLURM_GTIDS SLURM_LOCALID SLURM_NNODES SLURM_NPROCS SLURM_PROCID
    SLURM_RESTART_COUNT SLURM_TASKS_PER_NODE SLURM_TASK_PID
    RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT
    ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE
    NNODES JOB_COMPLETION_INDEX MEMORYD_DIR MEMORYD_TOKEN_FILE
    address attempt end_s events_bytes file is_stopping job_text log mode name new_token node
    node_list nodes num_efa num_files num_finished num_given num_gpus num_nodes num_saved
    peer_listen peer_port peer_ports peers peers_file rdzv_endpoint rdzv_host rdzv_port
    restart run_dir shm_mib size sizes status step step_options switch token_file value was_asked
    """.split()  # noqa: SIM905  a list would take a line each
)


def _secrets(job: JobContent) -> Iterator[str]:
    yield from held_secrets(job.model_dump(mode="json"))
    if both := sorted(set(job.env) & set(job.cluster.secrets)):
        yield f"env and cluster.secrets both set {', '.join(both)}; remove one"


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


_RULES: tuple[Rule, ...] = (
    script_rules,
    *map(_of_ours, (_model_dimensions, _world, _megatron, _schedule)),
    _hardware,
    _memory,
    _cpus,
    _of_ours(_elastic),
    grace_rules,
    recovery_rules,
    fault_rules,
    mmap_rules,
    tiered_rules,
    _environment,
    slurm_rules,
    k8s_rules,
    _secrets,
)

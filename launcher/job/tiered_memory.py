"""Memory of a node that checkpoints take, and that a pod's workers ask for. Pure."""

from __future__ import annotations

import math
from fractions import Fraction

from launcher.job.content import JobContent, TrainingContent
from launcher.job.parameters import count_parameters
from launcher.job.workload import MegatronTrainer, TorchTrainer
from resilience.settings import TieredSettings

WORKER_MEMORY_GIB = 1
"""The agent, torch and the interpreter of each of a node's workers."""
DAEMON_MIB = 1024
"""What memoryd takes beside the checkpoints, parts on their way to S3 among it."""

# Two moments and, where the weights are none themselves, a copy of the weights, 4 bytes each.
_OPTIMIZER_BYTES = 8
_COPY_BYTES = 4
_SLACK = Fraction(105, 100)
# Descriptions, and segments of whole pages.
_SLACK_MIB = 16


def state_bytes(job: TrainingContent) -> int:
    """Return the bytes of one copy of the training state: weights and Adam's moments."""
    trainer = job.trainer
    # Plain PyTorch keeps its weights in 32 bits, whatever it computes in.
    is_copied = isinstance(trainer, MegatronTrainer) and trainer.precision == "bf16"
    weight_bytes = 2 + _COPY_BYTES if is_copied else 4
    return count_parameters(job.model) * (weight_bytes + _OPTIMIZER_BYTES)


def own_bytes(job: TrainingContent) -> int:
    """Return the bytes that one node's workers write in a checkpoint, equal shards once."""
    ranks = _ranks_of_replica(job.trainer)
    return math.ceil(state_bytes(job) * Fraction(min(job.trainer.num_devices, ranks), ranks))


def num_writers(trainer: TorchTrainer | MegatronTrainer) -> int:
    """Return on how many nodes the shard with the fewest is, without a copy to another.

    The ranks of a pipeline stage follow each other, and those of its copies follow within it.
    """
    num_ranks, stages = trainer.num_devices, trainer.num_stages
    shards = max(1, _ranks_of_replica(trainer) // stages)
    if shards >= num_ranks:
        return min(trainer.num_nodes, trainer.replicas)
    stage_ranks, last = trainer.world_size // stages, (trainer.replicas - 1) * shards
    firsts = (stage * stage_ranks + shard for stage in range(stages) for shard in range(shards))
    return min((rank + last) // num_ranks - rank // num_ranks + 1 for rank in firsts)


def budget_min_mib(job: TrainingContent, settings: TieredSettings) -> int:
    """Return below which budget a node has no room for the steps that it is to keep."""
    return math.ceil(_held_bytes(job, settings, settings.ram.keep + 1) / 2**20)


def budget_mib(job: JobContent, settings: TieredSettings) -> int:
    """Return the memory in MiB of all checkpoints on a node.

    That is what the recipe says, or room for the steps kept, the one being written and those
    that may wait for the store, each with what other nodes have sent, and a twentieth more. Of a
    script the recipe has to say it.
    """
    training = job.training
    if settings.ram.budget_mib is not None or training is None:
        return settings.ram.budget_mib or 0
    waiting = (settings.store.waiting_max or 1) if settings.store else 0
    needed = _held_bytes(training, settings, settings.ram.keep + 1 + waiting)
    return math.ceil(needed * _SLACK / 2**20) + _SLACK_MIB


def tiered_mib(job: JobContent) -> int:
    """Return the memory in MiB that checkpoints and their daemon take on a node, 0 without."""
    return budget_mib(job, job.memoryd) + DAEMON_MIB if job.memoryd else 0


def requested_memory_gib(job: JobContent) -> int | None:
    """Return the memory that a pod's workers ask for, None where they ask for none.

    Kubernetes gives no huge pages to a pod that asks for neither CPUs nor memory.
    """
    asked = job.resources
    if asked.memory_gib or asked.num_cpus or not asked.hugepages_2mi_mib:
        return asked.memory_gib
    num_processes = job.trainer.workers_per_node + job.resilience.spares_per_node
    return asked.shm_gib + num_processes * WORKER_MEMORY_GIB


def shm_mib(job: JobContent) -> int:
    """Return how large /dev/shm has to be on a node, 0 for any size."""
    return job.resources.shm_gib * 1024 + (budget_mib(job, job.memoryd) if job.memoryd else 0)


def _held_bytes(job: TrainingContent, settings: TieredSettings, num_steps: int) -> int:
    state, own = state_bytes(job), own_bytes(job)
    others = min(settings.ram.replicas * own, state)
    if settings.ram.peers_hold == "instead":
        # What a node has written stays only until a peer has it.
        return own + num_steps * others
    return num_steps * min(own + others, state)


def _ranks_of_replica(trainer: TorchTrainer | MegatronTrainer) -> int:
    return max(1, trainer.world_size // trainer.replicas)

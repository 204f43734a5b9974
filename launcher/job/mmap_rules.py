"""Rules about batches in mapped files. Nothing here reads anything but the job."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.cluster import K8sCluster
from launcher.job.content import JobContent, TrainingContent
from launcher.job.fields import shown
from launcher.job.workload import MegatronTrainer
from resilience.settings import CacheEncryption, MmapSettings

_WHERE = "resilience.mmap"
_TOKEN_BYTES = 8
"""A token in a batch is an int64."""
_PAGE_BYTES = 4096


def num_positions(job: JobContent) -> int:
    """Return how many data-parallel positions the workers of a node have, at most."""
    trainer = job.trainer
    num_devices = trainer.workers_per_node
    if not isinstance(trainer, MegatronTrainer):
        return num_devices
    # Neighbours see the same samples, and so do the stages of a pipeline, which come last.
    neighbours = trainer.tensor_parallel * trainer.context_parallel
    size = max(1, trainer.data_parallel_size)
    positions = (
        {rank // neighbours % size for rank in range(first, first + num_devices)}
        for first in range(0, trainer.num_nodes * num_devices, num_devices)
    )
    return max(map(len, positions))


def mmap_rules(job: JobContent) -> Iterator[str]:
    """Yield what batches in mapped files cannot be."""
    settings = job.resilience.batches
    if settings is None:
        return
    if settings.encryption:
        yield from _encryption(settings.encryption)
    if training := job.training:
        yield from _budget(training, settings)
    yield from _folder(job, settings)


def _encryption(encryption: CacheEncryption) -> Iterator[str]:
    where = f"{_WHERE}.encryption"
    wanted = "key_file" if encryption.kind == "file" else "kms_key_id"
    if getattr(encryption, wanted) is None:
        yield f"{where}.{wanted} null; {where}.kind {encryption.kind!r} needs it"
    others = ("kms_key_id", "endpoint", "region") if encryption.kind == "file" else ("key_file",)
    for name in others:
        if (given := getattr(encryption, name)) is not None:
            yield (
                f"{where}.{name} {given!r} has no effect with {where}.kind "
                f"{encryption.kind!r}; set it to null"
            )


def _budget(job: TrainingContent, settings: MmapSettings) -> Iterator[str]:
    """Refuse what could never hold what it is told to; batches are known here."""
    trainer, elastic = job.trainer, job.resilience.elastic
    # The fewer ranks there are, the more has each of them to read.
    fewest = trainer.at_size(min(elastic.sizes)) if elastic else trainer
    rows = trainer.micro_batch_size * -(
        -trainer.num_micro_batches // max(1, fewest.data_parallel_size)
    )
    batch_bytes = rows * (job.data.seq_length + 1) * _TOKEN_BYTES + _PAGE_BYTES
    num_kept = settings.prefetch_length + max(
        settings.lookback_length, 2 * (settings.checkpoint_frequency or 0)
    )
    needed_mib = -(-num_kept * batch_bytes // (1 << 20)) + 1
    if settings.budget_mib < needed_mib:
        yield (
            f"{_WHERE}.budget_mib {settings.budget_mib} is less than the {needed_mib} MiB that "
            f"{num_kept} batches of {rows} samples take ({_WHERE}.prefetch_length "
            f"{settings.prefetch_length}, lookback_length {settings.lookback_length}, "
            f"checkpoint_frequency {shown(settings.checkpoint_frequency)})"
        )


def _folder(job: JobContent, settings: MmapSettings) -> Iterator[str]:
    if settings.folder is None or not isinstance(job.cluster, K8sCluster):
        return
    paths = [*job.cluster.mount_paths(is_writable=True), "/dev/shm"]
    if not any(f"{settings.folder}/".startswith(f"{each.rstrip('/')}/") for each in paths):
        yield (
            f"{_WHERE}.folder {settings.folder!r} is on no volume, so it would go with its "
            "container; allowed: null, or below /dev/shm or a mount_path of cluster.host_paths "
            "or cluster.volume_claims"
        )

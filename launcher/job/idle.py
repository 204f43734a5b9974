"""How long ranks wait for those that have one micro batch of a step more. Pure."""

from __future__ import annotations

from itertools import count

from launcher.job.content import TrainingContent

_IDLE_MAX = 0.1
"""A share of their time that nobody has to be told of."""


def idle_text(job: TrainingContent, num_nodes: int) -> str | None:
    """Return what ranks wait on so many nodes, None where that is little."""
    num, share = job.trainer.num_micro_batches, _idle_share(job, num_nodes)
    if share <= _IDLE_MAX:
        return None
    ranks = job.trainer.at_size(num_nodes).data_parallel_size
    return (
        f"{num} micro batches of a step leave the {ranks} data-parallel ranks of {num_nodes} "
        f"{'nodes' if num_nodes > 1 else 'node'} idle for {share:.0%} of the time"
    )


def idle_note(job: TrainingContent) -> str | None:
    """Return what ranks wait at the worst size that the job may have, and which batch mends it."""
    elastic = job.resilience.elastic
    sizes = elastic.sizes if elastic else (job.trainer.num_nodes,)
    worst = max(sizes, key=lambda size: _idle_share(job, size))
    text = idle_text(job, worst)
    if text is None:
        return None
    idle = [size for size in sizes if _idle_share(job, size) > _IDLE_MAX and size != worst]
    if idle:
        text += f", and for more than {_IDLE_MAX:.0%} on {', '.join(map(str, idle))}"
    fitting = next(
        num
        for num in count(job.trainer.num_micro_batches)
        if all(_idle_share(job, size, num) <= _IDLE_MAX for size in sizes)
    )
    return f"{text}; trainer.global_batch_size {fitting * job.trainer.micro_batch_size} would not"


def _idle_share(
    job: TrainingContent, num_nodes: int, num_micro_batches: int | None = None
) -> float:
    num = num_micro_batches or job.trainer.num_micro_batches
    ranks = job.trainer.at_size(num_nodes).data_parallel_size
    return 1 - num / (-(-num // ranks) * ranks)

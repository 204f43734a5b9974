"""Rules about recovery without checkpoints, and about the faults that a run injects.

Nothing here reads anything but the job.
"""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job.content import JobContent, TrainingContent
from launcher.job.fields import shown
from launcher.job.tiered_memory import num_writers
from launcher.job.workload import TorchTrainer
from resilience.settings import Fault, FaultsSettings

_SCRIPT_PLACES = ("data", "forward", "gate", "before_update", "after_update", "recovery")
"""Places that a loop of resilience.protect knows of."""


def recovery_rules(job: JobContent) -> Iterator[str]:
    """Yield what does not go together with recovery without checkpoints."""
    settings, where = job.resilience.checkpointless, "resilience.checkpointless"
    if settings is None:
        return
    if job.trainer.max_restarts:
        yield (
            f"trainer.max_restarts {job.trainer.max_restarts} and {where}.process_restarts_max "
            f"{settings.process_restarts_max} both say how often workers are started again; "
            "set trainer.max_restarts to 0"
        )
    if settings.partition_patience_s < settings.lease_s:
        yield (
            f"{where}.partition_patience_s {settings.partition_patience_s:g} is less than "
            f"{where}.lease_s {settings.lease_s:g}; allowed: at least that, since nobody counts as "
            "silent before"
        )
    if job.training and job.resilience.elastic:
        yield from _elastic(job.training)


def _elastic(job: TrainingContent) -> Iterator[str]:
    """Yield why the ranks that are left could not go on."""
    where = "resilience.elastic"
    settings, elastic = job.resilience.checkpointless, job.resilience.elastic
    assert settings
    assert elastic
    num_nodes = job.trainer.num_nodes
    if settings.standby_nodes and elastic.nodes_max != num_nodes:
        yield (
            f"resilience.checkpointless.standby_nodes {settings.standby_nodes} does not fit "
            f"{where}.nodes_max {elastic.nodes_max}, up to which every node trains; allowed: "
            f"nodes_max {num_nodes}, that is trainer.num_nodes"
        )
    yield from _copies(job, f"{where} with resilience.checkpointless")


def shared_fate_note(job: JobContent) -> str | None:
    """Return that a run that recovers has all copies of a shard on one node, None where not."""
    if job.training is None:
        return None
    trainer = job.training.trainer
    is_meant = job.resilience.checkpointless and trainer.replicas > 1 and trainer.num_nodes > 1
    if not is_meant or num_writers(trainer) > 1:
        return None
    cost = "the steps since the last checkpoint" if job.resilience.tiered else "all steps"
    return (
        f"trainer.num_replicas {trainer.replicas} puts all copies of a shard on one node, as the "
        f"ranks of each of the {trainer.num_stages} pipeline stages follow each other: the loss of "
        f"that node costs {cost}; copies are on different nodes with trainer.num_nodes of at least "
        f"{2 * trainer.num_stages}, or trainer.pipeline_parallel of at most "
        f"{trainer.num_nodes // 2}"
    )


def one_node_rules(job: TrainingContent, where: str) -> Iterator[str]:
    """Yield why not each node has whole copies of the state, which come and go with it."""
    yield from (found := list(_copies(job, where)))
    trainer = job.trainer
    shards = trainer.num_shards or 1
    if not found and trainer.num_devices % shards:
        yield (
            f"trainer.num_replicas {trainer.num_replicas} does not fit {where}: "
            f"the {shards} ranks of a copy are on several nodes, and "
            f"trainer.num_devices is {trainer.num_devices}; allowed: as many copies as nodes, or a "
            "multiple of it"
        )


def _copies(job: TrainingContent, where: str) -> Iterator[str]:
    """Yield why copies of the state do not come and go with whole nodes."""
    trainer = job.trainer
    if not isinstance(trainer, TorchTrainer):
        yield (
            f"trainer.kind {trainer.kind!r} does not fit {where}: a "
            "copy of Megatron's state lies on ranks of several nodes; allowed: 'torch'"
        )
        return
    shards, num_ranks = trainer.num_shards or 1, trainer.num_devices
    if trainer.sharding == "full":
        yield (
            f"trainer.sharding 'full' does not fit {where}: its one "
            "copy of the state lies on all nodes; allowed: 'none', or 'hybrid'"
        )
    elif num_ranks % shards and shards % num_ranks:
        yield (
            f"trainer.num_replicas {trainer.num_replicas} does not fit {where}: the {shards} "
            f"ranks of a copy take a part of a node with trainer.num_devices {num_ranks}; allowed: "
            "copies of whole nodes, or nodes with whole copies"
        )


def fault_rules(job: JobContent) -> Iterator[str]:
    """Yield what a run may not bring upon itself."""
    faults = job.resilience.faults
    if faults is None:
        return
    if job.resilience.checkpointless is None:
        yield (
            "resilience.faults needs resilience.checkpointless, without which a fault would only "
            "end the run; choose it with resilience/checkpointless=default"
        )
        return
    for index, fault in enumerate(faults.injected):
        where = f"resilience.faults.injected[{index}]"
        yield from _place(job, fault, where)
        yield from _values(fault, where)
    yield from _repeated(faults)
    yield from _script(faults) if job.training is None else _corruption(job, faults)


def _script(faults: FaultsSettings) -> Iterator[str]:
    """Refuse what does not happen in a loop of resilience.protect."""
    where = "does not fit trainer.kind 'script'"
    for index, fault in enumerate(faults.injected):
        name = f"resilience.faults.injected[{index}]"
        if fault.kind == "corrupt":
            yield (
                f"{name}.kind 'corrupt' {where}, whose state is compared with no digest; allowed: "
                "exception, sigkill, sigstop, exit or slow"
            )
        elif fault.place not in _SCRIPT_PLACES:
            yield (
                f"{name}.place {fault.place!r} {where}, as the loop of resilience.protect does not "
                f"see it; allowed: {', '.join(_SCRIPT_PLACES)}"
            )
    if faults.random is not None:
        yield (
            f"resilience.faults.random {where}, of which the number of steps is not known; "
            "allowed: null"
        )


def _place(job: JobContent, fault: Fault, where: str) -> Iterator[str]:
    """Hold where a fault strikes against what the run has."""
    trainer = job.trainer
    if trainer.max_steps is not None and fault.step >= trainer.max_steps:
        yield (
            f"{where}.step {fault.step} is no step of the run; "
            f"allowed: less than trainer.max_steps {trainer.max_steps}"
        )
    if (fault.rank is None) == (fault.node is None):
        yield (
            f"{where} has rank {shown(fault.rank)} and node {shown(fault.node)}; "
            "allowed: exactly one of them"
        )
        return
    for name, value, limit, limited_by in (
        ("rank", fault.rank, trainer.world_size, "its world size"),
        ("node", fault.node, trainer.num_nodes, "trainer.num_nodes"),
    ):
        if value is not None and value >= limit:
            allowed = f"allowed: less than {limited_by} {limit}"
            yield f"{where}.{name} {value} is no {name} of the run; {allowed}"


def _values(fault: Fault, where: str) -> Iterator[str]:
    """Hold a fault's values against its kind."""
    for name, kind, example in (
        ("tensor", "corrupt", "'parameter' or 'moment'"),
        ("seconds", "slow", "a number of seconds"),
    ):
        value = getattr(fault, name)
        if fault.kind == kind and value is None:
            yield f"{where}.{name} null does not fit kind {kind!r}; allowed: {example}"
        if fault.kind != kind and value is not None:
            yield f"{where}.{name} {value!r} does not fit kind {fault.kind!r}; allowed: null"


def _repeated(faults: FaultsSettings) -> Iterator[str]:
    """Refuse faults in a recovery that no other fault begins."""
    for index, fault in enumerate(faults.injected):
        if fault.place == "recovery" and not any(
            other.kind != "slow" and other.place != "recovery" and other.step >= fault.step
            for other in faults.injected
        ):
            yield (
                f"resilience.faults.injected[{index}].place 'recovery' needs another fault that "
                f"begins a recovery at step {fault.step} or later, which slow does not"
            )
    if (drawn := faults.random) and not any(
        _is_corruptible(place) if kind == "corrupt" else place != "recovery"
        for kind in drawn.kinds
        for place in drawn.places
    ):
        yield (
            f"resilience.faults.random.kinds {list(drawn.kinds)} have no fault in "
            f"resilience.faults.random.places {list(drawn.places)}; add a place such as 'forward'"
        )


def _corruption(job: JobContent, faults: FaultsSettings) -> Iterator[str]:
    """Refuse changed bits that no check could find."""
    corrupting = [
        (f"resilience.faults.injected[{index}].place", fault.place)
        for index, fault in enumerate(faults.injected)
        if fault.kind == "corrupt"
    ]
    for where, place in corrupting:
        if not _is_corruptible(place):
            yield (
                f"{where} {place!r} does not fit kind 'corrupt', as what is changed there is "
                "overwritten or taken for right; allowed: every place but 'within_update' and "
                "'recovery'"
            )
    is_drawn = faults.random is not None and "corrupt" in faults.random.kinds
    settings = job.resilience.checkpointless
    if (corrupting or is_drawn) and settings and settings.self_check_every_n_steps != 1:
        yield (
            "resilience.checkpointless.self_check_every_n_steps "
            f"{shown(settings.self_check_every_n_steps)} would not find the faults 'corrupt' of "
            "resilience.faults before they spread; allowed with them: 1"
        )


def _is_corruptible(place: str) -> bool:
    return place not in {"within_update", "recovery"}

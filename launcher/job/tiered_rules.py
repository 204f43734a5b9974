"""Rules about checkpoints in tiers. Nothing here reads anything but the job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from launcher.job.cluster import RENDEZVOUS_PORT, K8sCluster, SlurmCluster
from launcher.job.content import JobContent
from launcher.job.fields import shown
from launcher.job.tiered_memory import (
    DAEMON_MIB,
    budget_mib,
    budget_min_mib,
    num_writers,
    own_bytes,
)
from resilience.settings import RamTier, StoreTier, TieredSettings

_WHERE = "resilience.tiered"
STORE_URL = f"{_WHERE}.store.url"
"""Key that may be null in conf/, not in a job that runs: only whoever runs it knows its bucket."""
OPERATOR_PORT = 8080
"""Port at which HyperPod's operator reaches the agent."""
PEER_PORT = 9201
"""Where each node has an address of its own and the recipe names no port; AWS's has 9200."""
STORE_URL_FORM = "s3://BUCKET/PREFIX"
_OF_AWS: Mapping[str, Mapping[str, object]] = {
    "ram.": {
        "keep": 3, "replicas": 0, "domains_min": 1, "budget_mib": None, "peers_hold": "copies",
    },
    "": dict.fromkeys(("token_file", "peer_port", "http_port")),
    "store.": {
        "keep": None, "required": False, "waiting_max": None, "deadline_s": 60.0,
        "endpoint": None, "region": None, "path_style": False, "part_size_mib": None,
        "attempts": None,
    },
}  # fmt: skip
"""The values of fields that AWS's library cannot be told, by where they are."""


def tiered_rules(job: JobContent) -> Iterator[str]:
    """Yield what checkpoints in tiers cannot be."""
    settings = job.resilience.tiered
    if settings is None:
        return
    yield from _frequency("ram", settings.ram)
    if settings.store:
        yield from _frequency("store", settings.store)
        yield from _store(settings, settings.store)
        yield from _store_steps(settings.ram, settings.store)
    if settings.backend == "aws":
        yield from _aws(job, settings)
        return
    yield from _copies(job, settings.ram)
    yield from _ports(job, settings)
    yield from _budget(job, settings)


def _frequency(tier: str, given: RamTier | StoreTier) -> Iterator[str]:
    if (given.every_n_steps is None) == (given.every_s is None):
        yield (
            f"{_WHERE}.{tier}.every_n_steps {shown(given.every_n_steps)} and "
            f"{_WHERE}.{tier}.every_s {shown(given.every_s)}; allowed: one of them, "
            "the other null"
        )


def _store(settings: TieredSettings, store: StoreTier) -> Iterator[str]:
    if store.url is None:
        # It may be rendered: only who runs the job knows the place (launcher/support.py).
        return
    if store.url.startswith("folder:"):
        for name in ("endpoint", "region", "path_style", "part_size_mib", "attempts"):
            if value := getattr(store, name):
                yield (
                    f"{_WHERE}.store.{name} {value!r} does not fit {_WHERE}.store.url "
                    f"{store.url!r}; allowed with a folder: "
                    f"{'false' if name == 'path_style' else 'null'}"
                )


def _store_steps(ram: RamTier, store: StoreTier) -> Iterator[str]:
    """Refuse a store that waits for steps which memory never takes."""
    if store.every_n_steps and ram.every_n_steps and store.every_n_steps % ram.every_n_steps:
        yield (
            f"{_WHERE}.store.every_n_steps {store.every_n_steps} is no multiple of "
            f"{_WHERE}.ram.every_n_steps {ram.every_n_steps}, and the store gets only steps "
            "that memory has"
        )
    if store.every_n_steps and ram.every_s:
        yield (
            f"{_WHERE}.store.every_n_steps {store.every_n_steps} does not fit "
            f"{_WHERE}.ram.every_s {ram.every_s:g}, as memory may never have such a step; "
            f"set {_WHERE}.store.every_s"
        )
    if store.every_s and ram.every_s and store.every_s < ram.every_s:
        yield (
            f"{_WHERE}.store.every_s {store.every_s:g} is less than {_WHERE}.ram.every_s "
            f"{ram.every_s:g}, and the store gets only steps that memory has"
        )


def _copies(job: JobContent, ram: RamTier) -> Iterator[str]:
    nodes = job.trainer.num_nodes
    if ram.replicas > nodes - 1:
        yield (
            f"{_WHERE}.ram.replicas {ram.replicas} is more than the {nodes - 1} other nodes of "
            f"trainer.num_nodes {nodes}"
        )
    num_own = num_writers(job.training.trainer) if job.training else 1
    domains = max(1 + ram.replicas, num_own)
    if ram.peers_hold == "instead" and ram.replicas:
        domains = ram.replicas
    if ram.domains_min > domains:
        yield (
            f"{_WHERE}.ram.domains_min {ram.domains_min} is more than the {domains} nodes that "
            f"have a shard with {_WHERE}.ram.replicas {ram.replicas}, so that no step would ever "
            "be complete"
        )
    if ram.peers_hold == "instead" and not ram.replicas:
        yield (
            f"{_WHERE}.ram.peers_hold 'instead' needs {_WHERE}.ram.replicas of at least 1; "
            "without a peer nobody would hold a shard"
        )


def _ports(job: JobContent, settings: TieredSettings) -> Iterator[str]:
    is_pod = isinstance(job.cluster, K8sCluster) and job.cluster.has_indexed_pods
    is_operated = isinstance(job.cluster, K8sCluster) and job.cluster.job_kind == "hyperpod"
    peer, agent = (PEER_PORT, RENDEZVOUS_PORT) if is_pod else (None, None)
    ports = {
        f"{_WHERE}.peer_port": settings.peer_port or peer,
        f"{_WHERE}.http_port": settings.http_port,
        "cluster.rdzv_port": getattr(job.cluster, "rdzv_port", None) or agent,
        "HyperPod's operator": OPERATOR_PORT if is_operated else None,
    }
    for (one, port), (other, same) in itertools.combinations(ports.items(), 2):
        if port is not None and port == same:
            yield f"{one} and {other} both mean port {port}; choose two ports"
    if settings.http_port and job.cluster.kind == "local" and job.num_nodes_started > 1:
        yield (
            f"{_WHERE}.http_port {settings.http_port} would be opened by each of the "
            f"{job.num_nodes_started} nodes of this machine; allowed with cluster.kind 'local': "
            "null, or trainer.num_nodes 1"
        )


def _budget(job: JobContent, settings: TieredSettings) -> Iterator[str]:
    ram, training = settings.ram, job.training
    if training is None:
        yield from _budget_of_script(job, ram)
        return
    needed = budget_min_mib(training, settings)
    if ram.budget_mib is not None and ram.budget_mib < needed:
        yield (
            f"{_WHERE}.ram.budget_mib {ram.budget_mib} is less than the {needed} MiB that "
            f"{ram.keep} steps and one being written take with {ram.replicas} replicas, a node's "
            f"part of the training state being {own_bytes(training) >> 20} MiB; null works it out"
        )
        return
    budget = budget_mib(job, settings)
    shown_budget = budget if ram.budget_mib else f"null, which is {budget} here,"
    own_mib = own_bytes(training) >> 20
    taken = f"{shown_budget} for a node's part of the training state, {own_mib} MiB,"
    yield from _memory(job, budget, taken)


def _budget_of_script(job: JobContent, ram: RamTier) -> Iterator[str]:
    if ram.budget_mib is None:
        yield (
            f"{_WHERE}.ram.budget_mib null cannot be worked out with trainer.kind 'script', whose "
            "state has a size that only its program knows; allowed: the MiB of each node, or "
            "resilience/tiered=null"
        )
        return
    yield from _memory(job, ram.budget_mib, str(ram.budget_mib))


def _memory(job: JobContent, budget: int, words: str) -> Iterator[str]:
    """Hold the budget against what a node, or the job's part of it, has."""
    asked, instance = job.resources, job.instance
    taken = f"{_WHERE}.ram.budget_mib {words} with {DAEMON_MIB} MiB for memoryd"
    tiered_mib = budget + DAEMON_MIB
    is_within = isinstance(job.cluster, SlurmCluster) and asked.memory_gib is not None
    if is_within and asked.memory_gib is not None:
        if (left_mib := (asked.memory_gib - asked.shm_gib) * 1024) < tiered_mib:
            yield (
                f"{taken} is more than resources.memory_gib {asked.memory_gib} leaves beside "
                f"resources.shm_gib {asked.shm_gib}: {left_mib} MiB"
            )
        return
    # A pod's daemon has memory of its own beside that of the workers' container.
    workers_gib = asked.memory_gib if isinstance(job.cluster, K8sCluster) else None
    used_mib = (workers_gib or asked.shm_gib) * 1024 + asked.hugepages_2mi_mib
    if used_mib + tiered_mib > instance.memory_gib * 1024:
        name = "resources.memory_gib" if workers_gib else "resources.shm_gib"
        yield (
            f"{taken} and {name} {workers_gib or asked.shm_gib} are more than the "
            f"{instance.memory_gib} GiB of instance {instance.type!r}"
        )


def _aws(job: JobContent, settings: TieredSettings) -> Iterator[str]:
    """Refuse what AWS's library and its daemon cannot be told."""
    if not isinstance(job.cluster, K8sCluster):
        yield (
            f"{_WHERE}.backend 'aws' needs cluster.kind 'k8s', whose HyperPod runs the daemon, "
            f"and not {job.cluster.kind!r}; allowed here: 'memoryd'"
        )
    store = settings.store
    if store and store.url and not store.url.startswith("s3://"):
        yield f"{_WHERE}.store.url {store.url!r} does not fit backend 'aws'; allowed: s3://..."
    for where, given in (("ram.", settings.ram), ("", settings), ("store.", store)):
        for name, allowed in _OF_AWS[where].items():
            # A store that there is not has nothing to tell.
            if (value := getattr(given, name, allowed)) != allowed:
                yield (
                    f"{_WHERE}.{where}{name} {shown(value)} is nothing that AWS's library can be "
                    f"told; allowed with backend 'aws': {shown(allowed)}"
                )

"""The variables of the workers that follow from other fields of a job. Pure.

A recipe's `env` overrides each of them, and null there leaves one out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.job.content import JobContent


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that the launcher sets by itself."""

    name: str
    value: str
    follows_from: tuple[str, ...]
    """Keys of the recipe whose values make it so."""


def worker_environment(job: JobContent) -> dict[str, str]:
    """Return the variables of a job's workers by name: the recipe's, and those that follow."""
    content = job.model_dump(mode="json")
    ours = {each.name: each.value for each in own_variables(content)}
    return {
        name: value
        for name, value in sorted((ours | job.env).items())
        if value is not None and name not in job.cluster.secrets
    }


def own_variables(content: Mapping[Any, Any]) -> Iterator[Variable]:
    """Yield what follows from a composed config, be it a job or not, as plain data."""
    threads = _at(content, "trainer.threads_per_worker")
    if isinstance(threads, int):
        yield Variable("OMP_NUM_THREADS", str(threads), ("trainer.threads_per_worker",))
    accelerator = _at(content, "instance.accelerator")
    is_local = _at(content, "cluster.kind") == "local"
    if is_local and accelerator == "cpu":
        # A node's own name may resolve to an address that its workers cannot reach.
        yield Variable("GLOO_SOCKET_IFNAME", "lo", ("cluster.kind", "instance.accelerator"))
    if accelerator != "gpu":
        return
    # Less memory is lost to fragments, where batches and states differ in size.
    yield Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ("instance.accelerator",))
    if _at(content, "trainer.kind") == "megatron" and _is_over(
        1, content, "trainer.tensor_parallel"
    ):
        # In one queue a collective begins before the products that are to hide it.
        yield Variable(
            "CUDA_DEVICE_MAX_CONNECTIONS", "1", ("trainer.kind", "trainer.tensor_parallel")
        )
    if not is_local:
        yield from _network_variables(content)


def _network_variables(content: Mapping[Any, Any]) -> Iterator[Variable]:
    """Yield what workers on several nodes need to find each other over the right network."""
    counts = _keys_of_several_nodes(content)
    if not counts:
        return
    nodes = ("cluster.kind", "instance.accelerator", *counts)
    # Beginnings of names: the loopback, and what containers bring along. gloo
    # takes no such list; it is told the interface of the agent's address.
    yield Variable("NCCL_SOCKET_IFNAME", "^lo,docker,veth", nodes)
    if not _is_over(0, content, "instance.num_efa"):
        return
    efa = ("instance.num_efa", *nodes)
    yield Variable("FI_PROVIDER", "efa", efa)
    # Fewer synchronizations: the plugin orders its copies itself.
    yield Variable("FI_EFA_SET_CUDA_SYNC_MEMOPS", "0", efa)
    if _at(content, "resources.hugepages_2mi_mib") == 0:
        # A process that has registered huge pages cannot fork, as loaders of batches do.
        yield Variable("FI_EFA_USE_HUGE_PAGE", "0", (*efa, "resources.hugepages_2mi_mib"))


def _keys_of_several_nodes(content: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the keys that make the job one of several nodes, () where none does."""
    counts = {
        "trainer.num_nodes": 1,
        "resilience.elastic.nodes_max": 1,
        "resilience.checkpointless.standby_nodes": 0,
    }
    return tuple(key for key, alone in counts.items() if _is_over(alone, content, key))


def _is_over(limit: int, content: Mapping[Any, Any], key: str) -> bool:
    value = _at(content, key)
    return isinstance(value, int) and value > limit


def _at(content: Mapping[Any, Any], key: str) -> object:
    node: object = content
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node

"""The rules of a definition that join its fields, and that its table cannot say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.clusters.k8s.forms import amount, problem
from launcher.clusters.k8s.token import SECRET_PATH, TOKEN_MODE

_Fields = Mapping[str, Any]

_CONFIG_BYTES_MAX = 1024 * 1024
# A device plugin or the kubelet hands these out as a whole: the limit is the request.
_EXACT = re.compile(r"[^/]+/[^/]+|hugepages-\w+")
_HUGEPAGE = re.compile(r"hugepages-([1-9]\d*[KMGT]i)", re.ASCII)


def _config_map(value: _Fields, where: str) -> Iterator[str]:
    size = sum(len(item.encode()) for item in value.get("data", {}).values())
    if size > _CONFIG_BYTES_MAX:
        yield problem(f"{where}.data", f"{size} bytes", "allowed: at most 1 MiB")


def _resources(value: _Fields, where: str) -> Iterator[str]:
    requests, limits = value.get("requests", {}), value.get("limits", {})
    names = {*requests, *limits}
    for name in sorted(names):
        request, limit = requests.get(name), limits.get(name)
        if _EXACT.fullmatch(name):
            yield from _exact_resource(name, request, limit, f"{where}.limits[{name!r}]")
        elif request is not None and limit is not None and amount(request) > amount(limit):
            yield problem(f"{where}.requests[{name!r}]", request, f"allowed: at most {limit!r}")
    # A limit alone stands for the request, too.
    if any(name.startswith("hugepages-") for name in names) and not {"cpu", "memory"} & names:
        yield (
            f"{where} asks for huge pages, and for neither cpu nor memory; Kubernetes wants "
            "one of them beside: set resources.memory_gib or resources.num_cpus"
        )


def _exact_resource(name: str, request: Any, limit: Any, where: str) -> Iterator[str]:
    size = _HUGEPAGE.fullmatch(name)
    page, unit = (amount(size[1]), f"multiple of {size[1]}") if size else (1, "number of devices")
    if limit is None or (request is not None and amount(request) != amount(limit)):
        yield problem(where, limit, f"allowed: the same as the request, {request!r}")
    elif amount(limit) % page:
        yield problem(where, limit, f"allowed: a whole {unit}")


def _pod(value: _Fields, where: str) -> Iterator[str]:
    """Hold mounts against volumes, and the ports of the node against those of containers."""
    volumes = {volume["name"]: volume for volume in value.get("volumes", ())}
    names = ", ".join(map(repr, sorted(volumes))) or "it has none"
    mounted = set()
    for path, each in _numbered(value, where, "initContainers", "containers"):
        for mount_path, mount in _numbered(each, path, "volumeMounts"):
            mounted.add(mount["name"])
            if mount["name"] not in volumes:
                allowed = f"allowed: a volume of the pod: {names}"
                yield problem(f"{mount_path}.name", mount["name"], allowed)
            elif mount["mountPath"] == SECRET_PATH:
                yield from _token_mode(volumes[mount["name"]], f"{where}.volumes")
        for port_path, port in _numbered(each, path, "ports"):
            number = port["containerPort"]
            if value.get("hostNetwork") and port.get("hostPort", number) != number:
                allowed = f"allowed with hostNetwork: the container's, {number}"
                yield problem(f"{port_path}.hostPort", port["hostPort"], allowed)
    for name in sorted(volumes.keys() - mounted):
        yield problem(f"{where}.volumes", name, "allowed: volumes that a container mounts")


def _token_mode(volume: _Fields, where: str) -> Iterator[str]:
    """Hold the mode of the run's token against what agents and daemons accept."""
    source = volume.get("projected") or volume.get("secret")
    if source and (mode := source.get("defaultMode", 0o644)) & ~TOKEN_MODE:
        field = f"{where} {volume['name']!r} defaultMode"
        yield problem(field, oct(mode), f"allowed: {TOKEN_MODE:#o} or less")


def _numbered(value: _Fields, where: str, *fields: str) -> Iterator[tuple[str, _Fields]]:
    for field in fields:
        for index, each in enumerate(value.get(field) or ()):
            yield f"{where}.{field}[{index}]", each


def _elastic_policy(value: _Fields, where: str) -> Iterator[str]:
    for path, size in _numbered(value, where, "replicaDiscreteValues"):
        yield from _out_of_range(path, size, value, "")


def _hyperpod(value: _Fields, where: str) -> Iterator[str]:
    elastic = value.get("elasticPolicy", {})
    for path, spec in _numbered(value, where, "replicaSpecs"):
        size = spec.get("replicas") or 0
        yield from _out_of_range(f"{path}.replicas", size, elastic, "elasticPolicy's ")
        most, high = spec.get("maxReplicas"), elastic.get("maxReplicas")
        if most is not None and high is not None and most != high:
            allowed = f"allowed: elasticPolicy's maxReplicas, {high}"
            yield problem(f"{path}.maxReplicas", most, allowed)


def _out_of_range(where: str, size: Any, elastic: _Fields, whose: str) -> Iterator[str]:
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    if (low is not None and size < low) or (high is not None and size > high):
        yield problem(where, size, f"allowed: {whose}minReplicas {low} to maxReplicas {high}")


RULES: Mapping[str, Callable[[_Fields, str], Iterator[str]]] = {
    "ConfigMap": _config_map,
    "ElasticPolicy": _elastic_policy,
    "HyperPodSpec": _hyperpod,
    "PodSpec": _pod,
    "ResourceRequirements": _resources,
}
"""By definition. Each sees fields that are sound by themselves, without those that are null."""

"""What the documents of a manifest may hold, by kind.

For a HyperPodPyTorchJob this is stricter than AWS's own model, which lets
through any number, any word and sizes that exclude each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.clusters.k8s.container_fields import (
    annotation_map,
    config_key,
    known,
    label_map,
    label_name,
    subdomain_name,
)
from launcher.clusters.k8s.pod_fields import POD_TEMPLATE
from launcher.clusters.k8s.shape import (
    Check,
    anything,
    boolean,
    filled,
    form,
    items,
    mapping,
    one_of,
    problem,
    shape,
    text,
    whole,
)
from launcher.job.fields import matching

KUBERNETES_JOB = "batch/v1 Job"
HYPERPOD_JOB = "sagemaker.amazonaws.com/v1 HyperPodPyTorchJob"

_CONFIG_BYTES_MAX = 1024 * 1024


_service_name = matching(
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "an RFC 1035 label, that is at most 63 of a-z, 0-9 and '-', "
    "beginning with a letter and ending with a letter or digit",
    most=63,
)
_number_of_processes = matching(
    r"auto|cpu|gpu|[1-9]\d*", "'auto', 'cpu', 'gpu' or a number in quotes"
)


def _regex(value: str) -> None:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"allowed: a regular expression: {error}") from error
    if groups > 1:
        raise ValueError(f"allowed: at most one group, and it has {groups}")


def _config_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    size = sum(len(item.encode()) for item in value.get("data", {}).values())
    if size > _CONFIG_BYTES_MAX:
        yield problem(f"{where}.data", f"{size} bytes", "allowed: at most 1 MiB")


def _indexed_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if value.get("completionMode") == "Indexed" and value.get("completions") is None:
        yield f"{where}.completions is missing; completionMode 'Indexed' needs it"
    size = value.get("parallelism")
    if value.get("completions") != size:
        # The nodes of a run wait for each other: fewer at a time would wait for ever.
        allowed = f"allowed: the same as completions, {value.get('completions')}"
        yield problem(f"{where}.parallelism", size, allowed)
    policy = value["template"]["spec"].get("restartPolicy")
    if policy not in {"Never", "OnFailure"}:
        path = f"{where}.template.spec.restartPolicy"
        yield problem(path, policy, "allowed in a Job: 'Never', 'OnFailure'")


def _replica_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    high = value.get("maxReplicas")
    if high is not None and value.get("replicas", 0) > high:
        allowed = f"allowed: at most maxReplicas, {high}"
        yield problem(f"{where}.replicas", value.get("replicas", 0), allowed)


def _elastic_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    low, high = value.get("minReplicas"), value.get("maxReplicas")
    if low is not None and high is not None and low > high:
        yield problem(f"{where}.minReplicas", low, f"allowed: at most maxReplicas, {high}")
    sizes = value.get("replicaDiscreteValues") or []
    step = value.get("replicaIncrementStep")
    if sizes and step is not None:
        yield (
            f"{where}.replicaIncrementStep {step} and {where}.replicaDiscreteValues {sizes} "
            "exclude each other; allowed: one of them"
        )
    for size in sizes:
        if (low is not None and size < low) or (high is not None and size > high):
            allowed = f"allowed: minReplicas {low} to maxReplicas {high}"
            yield problem(f"{where}.replicaDiscreteValues", size, allowed)


def _log_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    pair = {"metricThreshold", "operator"} & {
        field for field, item in value.items() if item is not None
    }
    if len(pair) == 1:
        yield (
            f"{where} {value['name']!r} has {pair.pop()} alone; allowed: metricThreshold and "
            "operator together, or neither"
        )


def _hyperpod_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    elastic = value.get("elasticPolicy") or {}
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    for index, spec in enumerate(value["replicaSpecs"]):
        path, size = f"{where}.replicaSpecs[{index}]", spec.get("replicas", 0)
        if (low is not None and size < low) or (high is not None and size > high):
            allowed = f"allowed: elasticPolicy's minReplicas {low} to maxReplicas {high}"
            yield problem(f"{path}.replicas", size, allowed)
        most = spec.get("maxReplicas")
        if most is not None and high is not None and most != high:
            allowed = f"allowed: elasticPolicy's maxReplicas, {high}"
            yield problem(f"{path}.maxReplicas", most, allowed)


_METADATA_FIELDS: dict[str, Check] = known("generateName finalizers ownerReferences") | {
    "name": subdomain_name,
    "namespace": label_name,
    "labels": label_map,
    "annotations": annotation_map,
}
METADATA = shape(_METADATA_FIELDS, ["name"])


def _document(spec: Check, name: Check) -> Check:
    metadata = shape(_METADATA_FIELDS | {"name": name}, ["name"])
    return shape(_DOCUMENT | {"metadata": metadata, "spec": spec}, ["metadata", "spec"])


_DOCUMENT: dict[str, Check] = {"apiVersion": filled, "kind": filled, "metadata": METADATA}
_CONFIG_MAP = shape(
    _DOCUMENT | {"data": mapping(config_key, text), "binaryData": anything, "immutable": boolean},
    ["metadata"],
    [_config_rules],
)

_SERVICE_PORT = shape(
    {
        "name": label_name,
        "port": whole(1, 65535),
        "targetPort": anything,
        "nodePort": whole(1, 65535),
        "protocol": one_of("TCP", "UDP", "SCTP"),
        "appProtocol": text,
    },
    ["port"],
)
_SERVICE_SPEC = shape(
    known(
        "allocateLoadBalancerNodePorts clusterIPs externalIPs externalName externalTrafficPolicy "
        "healthCheckNodePort internalTrafficPolicy ipFamilies ipFamilyPolicy loadBalancerClass "
        "loadBalancerIP loadBalancerSourceRanges sessionAffinity sessionAffinityConfig "
        "trafficDistribution"
    )
    | {
        "clusterIP": text,
        "publishNotReadyAddresses": boolean,
        "selector": label_map,
        "ports": items(_SERVICE_PORT, unique="name"),
        "type": one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    }
)

_JOB_SPEC = shape(
    known("managedBy manualSelector podFailurePolicy selector successPolicy")
    | {
        "completionMode": one_of("Indexed", "NonIndexed"),
        "podReplacementPolicy": one_of("TerminatingOrFailed", "Failed"),
        "completions": whole(1),
        **known("parallelism backoffLimit backoffLimitPerIndex maxFailedIndexes", whole(0)),
        "activeDeadlineSeconds": whole(1),
        "ttlSecondsAfterFinished": whole(0),
        "suspend": boolean,
        "template": POD_TEMPLATE,
    },
    ["template"],
    [_indexed_rules],
)

_REPLICA_SPEC = shape(
    {
        "name": label_name,
        **known("replicas maxReplicas spares", whole(0)),
        "template": POD_TEMPLATE,
    },
    ["name", "template"],
    [_replica_rules],
)
_ELASTIC_POLICY = shape(
    {
        **known("minReplicas maxReplicas replicaIncrementStep", whole(1)),
        "replicaDiscreteValues": items(whole(1), least=1),
        **known("scalingTimeoutInSeconds gracefulShutdownTimeoutInSeconds", whole(0)),
        "faultyScaleDownTimeoutInSeconds": whole(0),
    },
    rules=[_elastic_rules],
)
_RESTART_POLICY = shape(
    {
        "evalPeriodSeconds": whole(1),
        **known("maxFullJobRestarts numRestartBeforeFullJobRestart", whole(0)),
        **known("maxNumRepeatOffendersToAvoid scaleUpSnoozeTimeInSeconds", whole(0)),
    },
    ["evalPeriodSeconds"],
)
_LOG_RULE = shape(
    {
        "name": filled,
        **known("logPattern stopPattern", form(_regex)),
        **known("expectedStartCutOffInSeconds expectedRecurringFrequencyInSeconds", whole(0)),
        "metricThreshold": whole(-(2**31)),
        "operator": one_of("gt", "lt", "eq", "gteq", "lteq"),
        "metricEvaluationDataPoints": whole(1),
    },
    ["name", "logPattern"],
    [_log_rules],
)
_RUN_POLICY = shape(
    {
        "cleanPodPolicy": one_of("All", "OnlyComplete", "None"),
        "jobMaxRetryCount": whole(0),
        **known("activeDeadlineSeconds faultDeadlineSeconds startupDeadlineSeconds", whole(1)),
        "suspend": boolean,
        "ttlSecondsAfterFinished": whole(-1),
        "workloadMode": filled,
        "restartPolicy": _RESTART_POLICY,
        "logMonitoringConfiguration": items(_LOG_RULE, unique="name"),
    }
)
_HYPERPOD_SPEC = shape(
    {
        "nprocPerNode": form(_number_of_processes),
        "replicaSpecs": items(_REPLICA_SPEC, least=1, unique="name"),
        "elasticPolicy": _ELASTIC_POLICY,
        "runPolicy": _RUN_POLICY,
    },
    ["replicaSpecs"],
    [_hyperpod_rules],
)

KINDS: Mapping[str, Check] = {
    "v1 ConfigMap": _CONFIG_MAP,
    "v1 Service": _document(_SERVICE_SPEC, form(_service_name)),
    KUBERNETES_JOB: _document(_JOB_SPEC, label_name),
    HYPERPOD_JOB: _document(_HYPERPOD_SPEC, label_name),
}
"""A check by apiVersion and kind; a team's template may bring further kinds."""

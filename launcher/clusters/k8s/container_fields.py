"""What the fields of a container may hold.

Tables, and the rules that join fields. Fields known to Kubernetes 1.33 that
need no check of ours stand with `known`, so that a misspelt one is found:
some clusters drop it without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from launcher.clusters.k8s.shape import (
    Check,
    amount,
    anything,
    boolean,
    filled,
    form,
    items,
    mapping,
    one_of,
    problem,
    quantity,
    shape,
    text,
    whole,
)
from launcher.job.fields import (
    check_absolute_path,
    check_dns_label,
    check_dns_subdomain,
    check_env_name,
    check_label_key,
    check_label_value,
    matching,
)

label_name = form(check_dns_label)
subdomain_name = form(check_dns_subdomain)
label_key = form(check_label_key)
label_map = mapping(label_key, form(check_label_value))
annotation_map = mapping(label_key, text)

_CAPABILITY = form(matching(r"[A-Z][A-Z0-9_]*", "a capability in capitals such as IPC_LOCK"))
_PORT_NAME = r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*"
# A device plugin or the kubelet hands these out as a whole: the limit is the request.
_EXACT = re.compile(r"[^/]+/[^/]+|hugepages-\w+")
_HUGEPAGE = re.compile(r"hugepages-(?P<size>\w+)")


def known(names: str, check: Check = anything) -> dict[str, Check]:
    """Return fields that have the same check; without one they need none of ours."""
    return dict.fromkeys(names.split(), check)


config_key = form(
    matching(r"[-._a-zA-Z0-9]+", "letters, digits, '-', '_' and '.', at most 253", most=253)
)


def _resource_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    requests, limits = value.get("requests") or {}, value.get("limits") or {}
    for name in sorted({*requests, *limits}):
        request, limit = requests.get(name), limits.get(name)
        if _EXACT.fullmatch(name):
            yield from _exact_resource(name, request, limit, where)
        elif request is not None and limit is not None and _number(request) > _number(limit):
            yield problem(f"{where}.requests[{name!r}]", request, f"allowed: at most {limit!r}")
    # A limit alone stands for the request, too.
    names = {*requests, *limits}
    if any(map(_HUGEPAGE.fullmatch, names)) and not {"cpu", "memory"} & names:
        yield (
            f"{where} asks for huge pages, and for neither cpu nor memory; Kubernetes wants "
            "one of them beside: set resources.memory_gib or resources.num_cpus"
        )


def _exact_resource(name: str, request: Any, limit: Any, where: str) -> Iterator[str]:
    if limit is None or (request is not None and _number(request) != _number(limit)):
        yield problem(
            f"{where}.limits[{name!r}]", limit, f"allowed: the same as the request, {request!r}"
        )
        return
    size = _HUGEPAGE.fullmatch(name)
    page = amount(size["size"]) if size else 1
    if page and _number(limit) % page:
        unit = f"multiple of {size['size']}" if size else "number of devices"
        yield problem(f"{where}.limits[{name!r}]", limit, f"allowed: a whole {unit}")


def _number(value: Any) -> Decimal:
    found = amount(value)
    assert found is not None
    return found


def _env_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if (value.get("value") is None) == (value.get("valueFrom") is None):
        yield f"{where} {value['name']!r} needs value or valueFrom, and not both"


def _env_source_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if len(value) != 1:
        yield f"{where} names {len(value)} sources; allowed: exactly one"


def _probe_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    handlers = sorted({"exec", "httpGet", "tcpSocket", "grpc"} & value.keys())
    if len(handlers) != 1:
        yield problem(where, handlers, "allowed: exactly one of exec, httpGet, tcpSocket, grpc")


def _success_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if value.get("successThreshold", 1) != 1:
        yield problem(f"{where}.successThreshold", value["successThreshold"], "allowed: 1")


def _security_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    escalation = value.get("allowPrivilegeEscalation")
    if value.get("privileged") and escalation is False:
        allowed = "allowed: true with privileged true"
        yield problem(f"{where}.allowPrivilegeEscalation", escalation, allowed)


_REFERENCE = shape(known("optional") | {"name": subdomain_name}, ["name"])
_KEY = shape(known("optional") | {"name": subdomain_name, "key": config_key}, ["name", "key"])
_ENV = shape(
    {
        "name": form(check_env_name),
        "value": text,
        "valueFrom": shape(
            {
                "secretKeyRef": _KEY,
                "configMapKeyRef": _KEY,
                "fieldRef": shape({"fieldPath": filled, "apiVersion": text}, ["fieldPath"]),
                "resourceFieldRef": anything,
            },
            rules=[_env_source_rules],
        ),
    },
    ["name"],
    [_env_rules],
)
_ENV_FROM = shape({"prefix": text, "secretRef": _REFERENCE, "configMapRef": _REFERENCE})
_PORT = shape(
    {
        "name": form(
            matching(_PORT_NAME, "at most 15 of a-z, 0-9 and '-', with a letter", most=15)
        ),
        **known("containerPort hostPort", whole(1, 65535)),
        "protocol": one_of("TCP", "UDP", "SCTP"),
        "hostIP": text,
    },
    ["containerPort"],
)
_PROBE_FIELDS: dict[str, Check] = {
    **known("httpGet tcpSocket grpc"),
    "exec": shape({"command": items(text, least=1)}, ["command"]),
    "initialDelaySeconds": whole(0),
    **known("periodSeconds timeoutSeconds failureThreshold successThreshold", whole(1)),
    "terminationGracePeriodSeconds": whole(1),
}
_PROBE = shape(_PROBE_FIELDS, rules=[_probe_rules, _success_rules])
_RESOURCES = shape(
    {**known("requests limits", mapping(filled, quantity)), "claims": anything},
    rules=[_resource_rules],
)
_SECURITY = shape(
    {
        **known("appArmorProfile seLinuxOptions seccompProfile windowsOptions"),
        **known("privileged allowPrivilegeEscalation", boolean),
        **known("readOnlyRootFilesystem runAsNonRoot", boolean),
        **known("runAsUser runAsGroup", whole(0)),
        "procMount": one_of("Default", "Unmasked"),
        "capabilities": shape(known("add drop", items(_CAPABILITY))),
    },
    rules=[_security_rules],
)
_MOUNT = shape(
    known("recursiveReadOnly subPathExpr")
    | {
        "name": label_name,
        "mountPath": form(check_absolute_path),
        "readOnly": boolean,
        "subPath": text,
        "mountPropagation": one_of("None", "HostToContainer", "Bidirectional"),
    },
    ["name", "mountPath"],
)
_CONTAINER_FIELDS: dict[str, Check] = known(
    "lifecycle resizePolicy restartPolicy stdin stdinOnce terminationMessagePath tty "
    "volumeDevices workingDir"
) | {
    "name": label_name,
    "image": filled,
    "imagePullPolicy": one_of("Always", "IfNotPresent", "Never"),
    **known("command args", items(text)),
    "env": items(_ENV, unique="name"),
    "envFrom": items(_ENV_FROM),
    "ports": items(_PORT, unique="name"),
    "resources": _RESOURCES,
    **known("startupProbe livenessProbe", _PROBE),
    "readinessProbe": shape(_PROBE_FIELDS, rules=[_probe_rules]),
    "securityContext": _SECURITY,
    "terminationMessagePolicy": one_of("File", "FallbackToLogsOnError"),
    "volumeMounts": items(_MOUNT, unique="mountPath"),
}
CONTAINER = shape(_CONTAINER_FIELDS, ["name", "image"])

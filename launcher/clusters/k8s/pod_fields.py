"""What the fields of a pod template may hold, but for its containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launcher.clusters.k8s.container_fields import (
    CONTAINER,
    annotation_map,
    known,
    label_key,
    label_map,
    label_name,
    subdomain_name,
)
from launcher.clusters.k8s.shape import (
    Check,
    anything,
    boolean,
    form,
    items,
    one_of,
    problem,
    quantity,
    shape,
    text,
    whole,
)
from launcher.job.fields import check_absolute_path, check_label_value


def _volume_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if len(value) != 2:
        yield f"{where} {value['name']!r} names {len(value) - 1} kinds; allowed: exactly one"


def _toleration_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    operator = value.get("operator", "Equal")
    if operator == "Exists" and value.get("value"):
        yield problem(f"{where}.value", value["value"], "allowed: none with operator 'Exists'")
    if operator == "Equal" and not value.get("key"):
        yield f"{where} has no key; allowed: none only with operator 'Exists'"
    if value.get("tolerationSeconds") is not None and value.get("effect") != "NoExecute":
        yield problem(f"{where}.effect", value.get("effect"), "allowed: 'NoExecute' with a time")


def _expression_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    wants_values = value["operator"] in {"In", "NotIn", "Gt", "Lt"}
    if wants_values != bool(value.get("values")):
        needed = "at least one value" if wants_values else "no value"
        yield problem(
            f"{where}.values", value.get("values"), f"allowed: {needed} with {value['operator']!r}"
        )


_VOLUME = shape(
    known(
        "awsElasticBlockStore azureDisk azureFile cephfs cinder csi downwardAPI ephemeral fc "
        "flexVolume flocker gcePersistentDisk gitRepo glusterfs image iscsi nfs "
        "photonPersistentDisk portworxVolume projected quobyte rbd scaleIO storageos "
        "vsphereVolume secret"
    )
    | {
        "name": label_name,
        "configMap": shape(
            known("optional items") | {"name": subdomain_name, "defaultMode": whole(0, 0o777)},
            ["name"],
        ),
        "emptyDir": shape({"medium": one_of("", "Memory"), "sizeLimit": quantity}),
        "hostPath": shape(
            {
                "path": form(check_absolute_path),
                "type": one_of(
                    "", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket",
                    "CharDevice", "BlockDevice",
                ),
            },
            ["path"],
        ),
        "persistentVolumeClaim": shape(
            {"claimName": subdomain_name, "readOnly": boolean}, ["claimName"]
        ),
    },
    ["name"],
    [_volume_rules],
)  # fmt: skip

_TOLERATION = shape(
    {
        "key": label_key,
        "operator": one_of("Exists", "Equal"),
        "value": form(check_label_value),
        "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": whole(0),
    },
    rules=[_toleration_rules],
)


def _expressions(*operators: str) -> Check:
    fields = {"key": label_key, "operator": one_of(*operators), "values": items(text)}
    return items(shape(fields, ["key", "operator"], [_expression_rules]))


_NODE_TERM = shape(
    {
        "matchExpressions": _expressions("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "matchFields": anything,
    }
)
_SELECTOR = shape(
    {
        "matchLabels": label_map,
        "matchExpressions": _expressions("In", "NotIn", "Exists", "DoesNotExist"),
    }
)
_POD_TERM_FIELDS: dict[str, Check] = known(
    "namespaces namespaceSelector matchLabelKeys mismatchLabelKeys"
) | {"topologyKey": label_key, "labelSelector": _SELECTOR}
_POD_TERM = shape(_POD_TERM_FIELDS, ["topologyKey"])


def _scheduling(required: Check, preferred: Check, preferred_name: str) -> Check:
    weighed: dict[str, Check] = {"weight": whole(1, 100), preferred_name: preferred}
    return shape(
        {
            "requiredDuringSchedulingIgnoredDuringExecution": required,
            "preferredDuringSchedulingIgnoredDuringExecution": items(shape(weighed, [*weighed])),
        }
    )


_BETWEEN_PODS = _scheduling(items(_POD_TERM), _POD_TERM, "podAffinityTerm")
_AFFINITY = shape(
    {
        "nodeAffinity": _scheduling(
            shape({"nodeSelectorTerms": items(_NODE_TERM, least=1)}, ["nodeSelectorTerms"]),
            _NODE_TERM,
            "preference",
        ),
        "podAffinity": _BETWEEN_PODS,
        "podAntiAffinity": _BETWEEN_PODS,
    }
)


def _mount_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    volumes = {volume["name"] for volume in value.get("volumes") or ()}
    mounted = set()
    for path, container in _containers(value, where):
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            mounted.add(mount["name"])
            if mount["name"] not in volumes:
                names = ", ".join(map(repr, sorted(volumes))) or "it has none"
                allowed = f"allowed: a volume of the pod: {names}"
                yield problem(f"{path}.volumeMounts[{index}].name", mount["name"], allowed)
    for name in sorted(volumes - mounted):
        yield problem(f"{where}.volumes", name, "allowed: volumes that a container mounts")


def _containers(value: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for field in ("initContainers", "containers"):
        for index, container in enumerate(value.get(field) or ()):
            yield f"{where}.{field}[{index}]", container


def _network_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    if not value.get("hostNetwork"):
        return
    policy = value.get("dnsPolicy", "ClusterFirst")
    if policy == "ClusterFirst":
        allowed = "allowed with hostNetwork: 'ClusterFirstWithHostNet'"
        yield problem(f"{where}.dnsPolicy", policy, allowed)
    for path, container in _containers(value, where):
        for index, port in enumerate(container.get("ports") or ()):
            number = port["containerPort"]
            if port.get("hostPort", number) != number:
                allowed = f"allowed with hostNetwork: the container's, {number}"
                yield problem(f"{path}.ports[{index}].hostPort", port["hostPort"], allowed)


def _selector_rules(value: dict[str, Any], where: str) -> Iterator[str]:
    old = "beta.kubernetes.io/instance-type"
    selector = value.get("nodeSelector") or {}
    if old in selector:
        yield problem(
            f"{where}.nodeSelector key", old, "allowed: 'node.kubernetes.io/instance-type'"
        )


_POD_SPEC = shape(
    known(
        "dnsConfig ephemeralContainers hostAliases nodeName os overhead priority readinessGates "
        "resourceClaims resources runtimeClassName schedulerName schedulingGates "
        "serviceAccount topologySpreadConstraints"
    )
    | known(
        "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers "
        "setHostnameAsFQDN shareProcessNamespace",
        boolean,
    )
    | {
        "activeDeadlineSeconds": whole(1),
        "affinity": _AFFINITY,
        "containers": items(CONTAINER, least=1, unique="name"),
        "initContainers": items(CONTAINER, unique="name"),
        "dnsPolicy": one_of("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "hostname": label_name,
        "imagePullSecrets": items(shape({"name": subdomain_name}, ["name"]), unique="name"),
        "nodeSelector": label_map,
        "preemptionPolicy": one_of("PreemptLowerPriority", "Never"),
        "priorityClassName": subdomain_name,
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "securityContext": shape(
            known(
                "appArmorProfile runAsNonRoot seLinuxChangePolicy seLinuxOptions seccompProfile "
                "supplementalGroups supplementalGroupsPolicy sysctls windowsOptions"
            )
            | known("runAsUser runAsGroup fsGroup", whole(0))
            | {"fsGroupChangePolicy": one_of("OnRootMismatch", "Always")}
        ),
        "serviceAccountName": subdomain_name,
        "subdomain": label_name,
        "terminationGracePeriodSeconds": whole(0),
        "tolerations": items(_TOLERATION),
        "volumes": items(_VOLUME, unique="name"),
    },
    ["containers"],
    [_mount_rules, _network_rules, _selector_rules],
)  # fmt: skip

POD_TEMPLATE = shape(
    {
        "metadata": shape(
            known("name namespace finalizers creationTimestamp")
            | {"labels": label_map, "annotations": annotation_map}
        ),
        "spec": _POD_SPEC,
    },
    ["spec"],
)

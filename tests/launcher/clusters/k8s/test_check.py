"""Each rule that a manifest is held against, with a manifest that breaks it alone."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest

from launcher.clusters.k8s.check import check_manifest
from launcher.clusters.k8s.forms import amount
from launcher.clusters.k8s.schema import FILES, FOLDER
from launcher.errors import RecipeError
from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.k8s_job import KINDS, at, documents, manifest
from tests.launcher.shipped import RECIPES, shipped_job

REMOVED = object()
NODE = "spec affinity nodeAffinity"
REQUIRED = f"{NODE} requiredDuringSchedulingIgnoredDuringExecution nodeSelectorTerms"
PREFERRED = f"{NODE} preferredDuringSchedulingIgnoredDuringExecution"
EXPRESSION = f"{REQUIRED} 0 matchExpressions 0"


@functools.cache
def _full(kind: str) -> str:
    return manifest(full_job(kind))


def _broken(kind: str, start: str, path: str, value: Any) -> str:
    """Return the full manifest with one value replaced; JSON is YAML."""
    found = documents(full_job(kind))
    job = found.pop("job")
    roots = {**found, "job": job}
    spec = job["spec"]
    roots["pod"] = spec["template"] if kind == "job" else spec["replicaSpecs"][0]["template"]
    roots["container"] = roots["pod"]["spec"]["containers"][0]
    *parents, last = path.split()
    node = at(roots[start], " ".join(parents))
    key = int(last) if isinstance(node, list) else last
    if value is REMOVED:
        del node[key]
    elif isinstance(node, list) and key == len(node):
        node.append(value)
    else:
        node[key] = value
    return "\n---\n".join(json.dumps(document) for document in found.values())


def test_limits_are_of_fields_that_the_published_schemas_have() -> None:
    """Laid over a misspelt field, a limit would make it a known one."""
    schemas = {each: json.loads((FOLDER / each).read_text()) for each in FILES}
    limits = schemas.pop("limits.json")["definitions"]
    published = {
        name: own for each in schemas.values() for name, own in each["definitions"].items()
    }

    for name, limit in limits.items():
        fields = published[name].get("properties", {})
        assert limit.get("properties", {}).keys() <= fields.keys(), name
        assert {*limit.get("required", ())} <= fields.keys(), name


@pytest.mark.parametrize("kind", KINDS)
def test_full_manifest_is_sound(kind: str) -> None:
    check_manifest(_full(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_sound(recipe: str, kind: str) -> None:
    text = manifest(shipped_job(recipe, kind))
    check_manifest(text)
    assert text.isascii()


# What published schemas alone refuse has one case for each of their words: which fields and values
# they have is held against a server's, in tests/scenarios/k8s/test_api.py, and AWS's model.
LABEL = "allowed: an RFC 1123 label, that is at most 63 of a-z, 0-9 and '-', "
POD = [
    ("pod", "metadata labels a/b/c", "x", "metadata.labels key 'a/b/c'; allowed: a name"),
    ("pod", "metadata labels ok", "a b", "metadata.labels['ok'] 'a b'; allowed: at most 63"),
    ("pod", "metadata annotations", {"a": 1}, "metadata.annotations['a'] 1; allowed: text"),
    ("pod", "spec hostnetwork", True, "spec has no field 'hostnetwork'; closest: 'hostNetwork'"),
    ("pod", "spec hostNetwork", "yes", "spec.hostNetwork 'yes'; allowed: true, false"),
    ("pod", "spec dnsPolicy", "ClusterFirst",
     "spec.dnsPolicy 'ClusterFirst'; allowed: 'ClusterFirstWithHostNet' with hostNetwork"),
    ("pod", "spec dnsPolicy", "Host", "spec.dnsPolicy 'Host'; allowed: 'ClusterFirst', "),
    ("pod", "spec restartPolicy", "Sometimes",
     "spec.restartPolicy 'Sometimes'; allowed: 'Never', 'OnFailure'"),
    ("pod", "spec serviceAccountName", "A_b", "spec.serviceAccountName 'A_b'; allowed: an RFC"),
    ("pod", "spec priorityClassName", "A", "spec.priorityClassName 'A'; allowed: an RFC 1123 sub"),
    ("pod", "spec terminationGracePeriodSeconds", -1,
     "spec.terminationGracePeriodSeconds -1; allowed: a whole number of at least 0"),
    ("pod", "spec activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds 0; allowed: a whole"),
    ("pod", "spec imagePullSecrets 0 name", "a b", "imagePullSecrets[0].name 'a b'; allowed: "),
    ("pod", "spec nodeSelector beta.kubernetes.io/instance-type", "ml.p5.48xlarge",
     "nodeSelector key 'beta.kubernetes.io/instance-type'; allowed: 'node.kubernetes.io/instance"),
    ("pod", "spec nodeSelector node.kubernetes.io/instance-type", "ml.g5.xlarge",
     "'ml.g5.xlarge'; allowed: the job's instance.type, 'ml.p5.48xlarge'"),
    ("pod", "spec securityContext runAsUser", "root", "securityContext.runAsUser 'root'; allowed"),
    ("pod", f"{EXPRESSION} operator", "Exists",
     ".values ['1']; allowed: no value with 'Exists'"),
    ("pod", f"{EXPRESSION} values", [], ".values []; allowed: at least one value with 'In'"),
    ("pod", f"{REQUIRED}", [], "nodeSelectorTerms []; allowed: a list of at least 1 items"),
    ("pod", f"{PREFERRED} 0 weight", 101,
     ".weight 101; allowed: a whole number of at least 1, at most 100"),
    ("pod", "spec tolerations 0 operator", "exists",
     "tolerations[0].operator 'exists'; allowed: 'Exists', 'Equal'"),
    ("pod", "spec tolerations 0 effect", "NoSchedule",
     "tolerations[0].effect 'NoSchedule'; allowed: 'NoExecute' with a time"),
    ("pod", "spec tolerations 0 tolerationSeconds", -1, None),
    ("pod", "spec tolerations 0 value", "x",
     "tolerations[0].value 'x'; allowed: none with operator 'Exists'"),
    ("pod", "spec tolerations 1", {}, "tolerations[1].key None; allowed: none only with operator"),
    ("pod", "spec containers", [], "spec.containers []; allowed: a list of at least 1 items"),
    ("pod", "spec volumes 0", {"name": "config"}, "volumes[0] 'config' []; allowed: exactly one"),
    ("pod", "spec volumes 0 emptyDir", {}, "volumes[0] 'config' ['configMap', 'emptyDir']; all"),
    ("pod", "spec volumes 1 name", "config", "volumes[1].name 'config'; allowed: each name once"),
    ("pod", "spec volumes 1 emptyDir medium", "memory", ".medium 'memory'; allowed: '', 'Memory'"),
    ("pod", "spec volumes 2 persistentVolumeClaim claimName", "A", ".claimName 'A'; allowed: an R"),
    ("pod", "spec volumes 3 hostPath path", "nvme", "hostPath.path 'nvme'; allowed: an absolute"),
    ("pod", "spec volumes 4", {"name": "more", "emptyDir": {}},
     "spec.volumes 'more'; allowed: volumes that a container mounts"),
    ("pod", "spec volumes 0 configMap name", "other",
     "spec.volumes configMap ['other']; allowed: with 'llama3-70b-pretrain'"),
    ("pod", "spec volumes 4 projected defaultMode", 0o444,
     "spec.volumes 'token' defaultMode '0o444'; allowed: 0o440 or less"),
]  # fmt: skip
CONTAINER = [
    ("container", "image", " ", ".image ' '; allowed: text that is not empty"),
    ("container", "image", REMOVED, "containers[0].image is missing"),
    ("container", "name", "A", f"containers[0].name 'A'; {LABEL}"),
    ("container", "command", "sh x", ".command 'sh x'; allowed: a list"),
    ("container", "command 0", 1, ".command[0] 1; allowed: text"),
    ("container", "env 0 name", "1A", ".env[0].name '1A'; allowed: letters, digits and '_'"),
    ("container", "env 0 value", REMOVED, ".env[0] 'FI_PROVIDER' []; allowed: exactly one of val"),
    ("container", "env 0 valueFrom", {"secretKeyRef": {"name": "a", "key": "b"}},
     ".env[0] 'FI_PROVIDER' ['value', 'valueFrom']; allowed: exactly one of value, v"),
    ("container", "env 2 valueFrom secretKeyRef", {"name": "a", "key": "b"},
     ".env[2].valueFrom ['fieldRef', 'secretKeyRef']; allowed: exactly one"),
    ("container", "env 2 valueFrom", {"secretKeyRef": {"name": "a", "key": "b c"}},
     ".key 'b c'; allowed: letters, digits, '-', '_' and '.', at most 253"),
    ("container", "envFrom 0 secretRef name", "A", ".envFrom[0].secretRef.name 'A'; allowed: an R"),
    ("container", "ports 0 containerPort", 0,
     ".ports[0].containerPort 0; allowed: a whole number of at least 1, at most 65535"),
    ("container", "ports 0 name", "123", ".ports[0].name '123'; allowed: at most 15"),
    ("container", "ports 0 name", "a" * 16, ".ports[0].name 'aaaaaaaaaaaaaaaa'; allowed: at most"),
    ("container", "ports 0 hostPort", 81, ".ports[0].hostPort 81; allowed with hostNetwork: the"),
    ("container", "resources limits nvidia.com/gpu", 4,
     ".resources.limits['nvidia.com/gpu'] 4; allowed: the same as the request, 8"),
    ("container", "resources limits vpc.amazonaws.com/efa", REMOVED,
     ".resources.limits['vpc.amazonaws.com/efa'] None; allowed: the same as the request, 32"),
    ("container", "resources limits hugepages-2Mi", "5122Mi",
     ".resources.limits['hugepages-2Mi'] '5122Mi'; allowed: the same as the request, '5120Mi'"),
    ("container", "resources",
     {"requests": {"cpu": 1, "hugepages-2Mi": "3Mi"}, "limits": {"hugepages-2Mi": "3Mi"}},
     ".limits['hugepages-2Mi'] '3Mi'; allowed: a whole multiple of 2Mi"),
    ("container", "resources", {"limits": {"nvidia.com/gpu": "500m"}},
     ".limits['nvidia.com/gpu'] '500m'; allowed: a whole number of devices"),
    ("container", "resources", {"limits": {"hugepages-2Mi": "2Mi"}},
     ".resources asks for huge pages, and for neither cpu nor memory; Kubernetes wants one"),
    ("container", "resources", {"limits": {"nvidia.com/gpu": 9}},
     "limits['nvidia.com/gpu'] 9; allowed: the 8 of instance 'ml.p5.48xlarge'"),
    ("container", "resources", {"limits": {"vpc.amazonaws.com/efa": 33}},
     "limits['vpc.amazonaws.com/efa'] 33; allowed: the 32 of instance 'ml.p5.48xlarge'"),
    ("container", "resources limits memory", "1Ti", None),
    ("container", "resources", {"limits": None}, None),
    ("container", "resources limits memory", "1023Gi",
     ".resources.requests['memory'] '1024Gi'; allowed: at most '1023Gi'"),
    ("container", "resources requests memory", "32 Gi",
     ".resources.requests['memory'] '32 Gi'; allowed: a quantity"),
    ("container", "livenessProbe periodSeconds", 0, ".livenessProbe.periodSeconds 0; allowed: a w"),
    ("container", "livenessProbe exec command", [], ".livenessProbe.exec.command []; allowed: a l"),
    ("container", "livenessProbe successThreshold", 2,
     ".livenessProbe.successThreshold 2; allowed: 1"),
    ("container", "readinessProbe successThreshold", 2, None),
    ("container", "startupProbe exec", REMOVED, ".startupProbe []; allowed: exactly one of exec, "),
    ("container", "startupProbe tcpSocket", {"port": 1},
     ".startupProbe ['exec', 'tcpSocket']; allowed: exactly one of exec, grpc"),
    ("container", "securityContext capabilities add", ["ipc_lock"],
     ".capabilities.add[0] 'ipc_lock'; allowed: a capability in capitals such as IPC_LOCK"),
    ("container", "securityContext allowPrivilegeEscalation", False,
     ".allowPrivilegeEscalation False; allowed: true with privileged true"),
    ("container", "volumeMounts 1 mountPath", "shm", ".mountPath 'shm'; allowed: an absolute path"),
    ("container", "volumeMounts 1 name", "other",
     ".volumeMounts[1].name 'other'; allowed: a volume of the pod: 'claim-0', 'config', 'host-0'"),
]  # fmt: skip
HYPERPOD = [
    ("job", "spec replicaSpec", [], "spec has no field 'replicaSpec'; closest: 'replicaSpecs'"),
    ("job", "spec replicaSpecs", REMOVED, "spec.replicaSpecs is missing"),
    ("job", "spec nprocPerNode", "0", "spec.nprocPerNode '0'; allowed: 'auto', 'cpu', 'gpu' or a "),
    ("job", "spec replicaSpecs 0 template", REMOVED, "replicaSpecs[0].template is missing"),
    ("job", "spec replicaSpecs 0 spares", -1, "replicaSpecs[0].spares -1; allowed: a whole number"),
    ("job", "spec replicaSpecs 0 replicas", 17, "replicas 17; allowed: at most maxReplicas, 16"),
    ("job", "spec replicaSpecs 0 replicas", 4,
     "replicas 4; allowed: elasticPolicy's minReplicas 8 to maxReplicas 16"),
    ("job", "spec replicaSpecs 0 maxReplicas", 17,
     "maxReplicas 17; allowed: elasticPolicy's maxReplicas, 16"),
    ("job", "spec elasticPolicy minReplicas", 17, "minReplicas 17; allowed: at most maxReplicas, "),
    ("job", "spec elasticPolicy minReplicas", 0, "minReplicas 0; allowed: a whole number of at le"),
    ("job", "spec elasticPolicy replicaIncrementStep", 0, "replicaIncrementStep 0; allowed: a who"),
    ("job", "spec elasticPolicy replicaDiscreteValues", [8],
     "elasticPolicy.replicaDiscreteValues [8]; allowed: none beside replicaIncrementStep"),
    ("job", "spec elasticPolicy", {"minReplicas": 8, "maxReplicas": 16,
                                   "replicaDiscreteValues": [8, 99]},
     "replicaDiscreteValues[1] 99; allowed: minReplicas 8 to maxReplicas 16"),
    ("job", "spec elasticPolicy scalingTimeoutInSeconds", -1, "scalingTimeoutInSeconds -1; allowe"),
    ("job", "spec runPolicy cleanPodPolicy", "Running",
     "runPolicy.cleanPodPolicy 'Running'; allowed: 'All', 'OnlyComplete', 'None'"),
    ("job", "spec runPolicy jobMaxRetryCount", -5, "runPolicy.jobMaxRetryCount -5; allowed: a who"),
    ("job", "spec runPolicy jobMaxRetryCount", True, "runPolicy.jobMaxRetryCount True; allowed: a"),
    ("job", "spec runPolicy ttlSecondsAfterFinished", -2, "ttlSecondsAfterFinished -2; allowed: a"),
    ("job", "spec runPolicy ttlSecondsAfterFinished", -1, None),
    ("job", "spec runPolicy activeDeadlineSeconds", 0, "activeDeadlineSeconds 0; allowed: a whole"),
    ("job", "spec runPolicy restartPolicy maxFullJobRestarts", -1, "maxFullJobRestarts -1; allowe"),
    ("job", "spec runPolicy logMonitoringConfiguration 0 operator", ">",
     "operator '>'; allowed: 'gt', 'lt', 'eq', 'gteq', 'lteq'"),
    ("job", "spec runPolicy logMonitoringConfiguration 0 operator", REMOVED,
     "[0].operator None; allowed: metricThreshold and operator together, or neither"),
    ("job", "spec runPolicy logMonitoringConfiguration 0 logPattern", "(a)(b)",
     "logPattern '(a)(b)'; allowed: at most one group, and it has 2"),
    ("job", "spec runPolicy logMonitoringConfiguration 0 logPattern", "(",
     "logPattern '('; allowed: a regular expression: missing ), unterminated subpattern"),
    ("job", "spec runPolicy logMonitoringConfiguration 0 stopPattern", "[", "stopPattern '['; all"),
    ("job", "spec runPolicy logMonitoringConfiguration 1 name", "a",
     "logMonitoringConfiguration[1].name 'a'; allowed: each name once"),
    ("job", "apiVersion", "sagemaker.amazonaws.com/v2",
     "HyperPodPyTorchJob.apiVersion 'sagemaker.amazonaws.com/v2'; allowed: sagemaker.amazonaws.co"),
    ("job", "status", {}, "HyperPodPyTorchJob has no field 'status'"),
]  # fmt: skip
JOB = [
    ("job", "spec completions", REMOVED, "Job.spec.completions None; allowed: a number with co"),
    ("job", "spec parallelism", 8, "Job.spec.parallelism 8; allowed: the same as completions, 16"),
    ("job", "spec template spec restartPolicy", REMOVED, "template.spec.restartPolicy is missing"),
    ("job", "spec backoffLimit", -1, "Job.spec.backoffLimit -1; allowed: a whole number of at lea"),
    ("job", "spec ttlSecondsAfterFinished", -1, "Job.spec.ttlSecondsAfterFinished -1; allowed: a "),
    ("job", "metadata name", "A_b", f"Job.metadata.name 'A_b'; {LABEL}"),
    ("job", "metadata namespace", "other", "the namespaces ['default', 'other']; allowed: the sam"),
    ("job", "kind", "Jobb", "the jobs []; allowed: one batch/v1 Job, sagemaker.amazonaws.com/v"),
    ("job", "kind", None, "None.kind None; allowed: text"),
    ("Service", "metadata name", "70b",
     "Service.metadata.name '70b'; allowed: an RFC 1035 label, that is at most 63 of a-z"),
    ("Service", "spec ports 0 port", 70000, "Service.spec.ports[0].port 70000; allowed: a whole n"),
    ("Service", "spec clusterIP", "10.0.0.1", "headless Service of the manifest: none"),
    ("ConfigMap", "data", None, None),
    ("ConfigMap", "data a/b", "x", "ConfigMap.data key 'a/b'; allowed: letters, digits"),
    ("ConfigMap", "data a", "x" * 1024 * 1024, "bytes'; allowed: at most 1 MiB"),
    ("ConfigMap", "metadata", REMOVED, "ConfigMap.metadata is missing"),
    ("ConfigMap", "metadata name", REMOVED, "ConfigMap.metadata.name is missing"),
]  # fmt: skip
CASES = [
    *(("job", *case) for case in (*POD, *CONTAINER)),
    *(("hyperpod", *case) for case in (POD[0], CONTAINER[0], *HYPERPOD)),
    *(("job", *case) for case in JOB),
]


def _id(item: Any) -> str:
    return "removed" if item is REMOVED else ascii(item)[:50]


@pytest.mark.parametrize(("kind", "start", "path", "value", "message"), CASES, ids=_id)
def test_manifest_with_one_wrong_value(
    kind: str, start: str, path: str, value: Any, message: str | None
) -> None:
    text = _broken(kind, start, path, value)
    if message is None:
        check_manifest(text)
        return

    with pytest.raises(RecipeError, match=re.escape(message)) as error:
        check_manifest(text)

    assert str(error.value).startswith("manifest: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [", "manifest: no YAML: while parsing", id="no-yaml"),
        pytest.param("a: 1\na: 2", "key 'a' stands there twice", id="key-twice"),
        pytest.param("1: 2", "key 1 is no text", id="key-is-no-text"),
        pytest.param("y: 2", "key True is no text", id="boolean-to-kubectl"),
        pytest.param("{kind: N, apiVersion: v1}", "kind False; allowed: text", id="value-too"),
        pytest.param("- a", "a document ['a']; allowed: a mapping", id="list"),
        pytest.param(
            "!!python/object/apply:os.getcwd []", "no YAML: could not determine", id="tag"
        ),
        pytest.param("", "the jobs []; allowed: one batch/v1 Job", id="empty"),
    ],
)
def test_text_that_is_no_manifest(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        check_manifest(text)


def test_every_wrong_field_has_a_line_of_its_own() -> None:
    text = _full("job").replace("restartPolicy: Never", "restartPolicy: No")
    text = text.replace('imagePullPolicy: "IfNotPresent"', "imagePullPolicy: No")

    with pytest.raises(RecipeError) as error:
        check_manifest(text)

    lines = str(error.value).splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["manifest:", "Job.spec.template.spec.containers[0].imagePullPolicy", "False;"],
        ["manifest:", "Job.spec.template.spec.initContainers[0].imagePullPolicy", "False;"],
        ["manifest:", "Job.spec.template.spec.restartPolicy", "False;"],
    ]


def test_same_document_twice_is_refused() -> None:
    config = _full("job").split("\n---\n")[0]

    with pytest.raises(RecipeError, match="ConfigMap llama3-70b-pretrain stands there 2 times"):
        check_manifest(f"{_full('job')}\n---\n{config}")


def test_two_jobs_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"the jobs .*; allowed: one batch/v1 Job,"):
        check_manifest(f"{_full('job')}\n---\n{_full('hyperpod')}")


def test_further_kinds_of_a_team_are_let_through_with_sound_metadata() -> None:
    own = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: zz, namespace: default}\ndata: {}"
    check_manifest(f"{_full('job')}\n---\n{own}")
    extra = "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: %s%s}\nspec: {}"
    check_manifest(f"{_full('job')}\n---\n{extra % ('x', ', namespace: default')}")

    with pytest.raises(RecipeError, match=r"PodDisruptionBudget\.metadata\.name 'A_b'"):
        check_manifest(f"{_full('job')}\n---\n{extra % ('A_b', '')}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4", 4), (4, 4), (0.5, "0.5"), ("500m", "0.5"), ("2Ki", 2048), ("1k", 1000),
        ("1.5Gi", 1610612736), ("1Ei", 2**60), ("1e3", 1000), ("5120Mi", 5368709120),
    ],
)  # fmt: skip
def test_quantities(text: Any, number: Any) -> None:
    assert float(amount(text)) == float(number)


@pytest.mark.parametrize("x", ["", "Gi", "1GiB", "1K", "1 Gi", "1_0", "NaN", "-1", True, None, []])
def test_what_is_no_quantity_is_refused(x: Any) -> None:
    with pytest.raises(ValueError, match="allowed: a quantity such as"):
        amount(x)

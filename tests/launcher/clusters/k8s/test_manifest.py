"""What stands where in a manifest, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.clusters.k8s.manifest import render_k8s
from launcher.clusters.k8s.security import efa_devices
from launcher.errors import RecipeError
from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.k8s_job import KINDS, LARGE, at, documents, k8s_job, pod, template_of
from tests.launcher.shipped import TEMPLATES, shipped_job

IN_PODS = {
    "metadata labels team": "x",
    "metadata annotations a/b": "c",
    "spec serviceAccountName": "trainer",
    "spec priorityClassName": "high",
    "spec hostNetwork": True,
    "spec dnsPolicy": "ClusterFirstWithHostNet",
    "spec imagePullSecrets": [{"name": "pull"}],
    "spec nodeSelector zone": "1",
    "spec tolerations": [
        {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3},
        {"key": "k", "operator": "Equal", "value": "v"},
    ],
    "spec affinity nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [
                {"key": "a", "operator": "In", "values": ["1"]},
                {"key": "b", "operator": "In", "values": ["2", "3"]},
            ]},
        ]},
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "preference": {"matchExpressions": [
                {"key": key, "operator": "In", "values": [value]}]}}
            for weight, key, value in ((7, "a", "1"), (9, "b", "2"))
        ],
    },
    "spec securityContext runAsUser": 0,
    "spec securityContext runAsGroup": 1,
    "spec securityContext fsGroup": 1,
    "spec containers 0 envFrom": [{"secretRef": {"name": "hub"}}],
    "spec containers 0 resources limits memory": "2048Gi",
    **{
        f"spec containers 0 {name}Probe": {
            "exec": {"command": ["cat", "/x"]}, "initialDelaySeconds": 0, "periodSeconds": 5,
            "timeoutSeconds": 1, "failureThreshold": 3,
        }
        for name in ("startup", "liveness", "readiness")
    },
    "spec containers 0 volumeMounts 2": {
        "name": "claim-0", "mountPath": "/data", "readOnly": True,
    },
    "spec containers 0 volumeMounts 3": {
        "name": "host-0", "mountPath": "/scratch", "readOnly": False,
    },
    "spec volumes 2": {
        "name": "claim-0", "persistentVolumeClaim": {"claimName": "fsx", "readOnly": True},
    },
    "spec volumes 3": {
        "name": "host-0", "hostPath": {"path": "/nvme", "type": "DirectoryOrCreate"},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_a_cluster_stand_in_the_pods(kind: str) -> None:
    found = pod(full_job(kind))

    assert {path: at(found, path) for path in IN_PODS} == IN_PODS
    # A topology brings pods of one job near each other, whatever else is asked for.
    (term,) = at(found, "spec affinity podAffinity preferredDuringSchedulingIgnoredDuringExecution")
    assert at(term, "podAffinityTerm topologyKey") == "layer"
    label = at(term, "podAffinityTerm labelSelector matchLabels")
    assert label == {"training-recipes/job": at(found, "metadata labels training-recipes/job")}


POD_FIELDS = [
    ("termination_grace_s", 90, "spec terminationGracePeriodSeconds", 90),
    ("image", "r/i:1", "spec containers 0 image", "r/i:1"),
    ("image_pull_policy", "Never", "spec containers 0 imagePullPolicy", "Never"),
    ("tolerations", [{"operator": "Exists"}], "spec tolerations", [{"operator": "Exists"}]),
    ("security.dropped_capabilities", ["KILL"], "spec containers 0 securityContext capabilities",
     {"drop": ["KILL"]}),
    ("security.allow_privilege_escalation", True, "spec containers 0 securityContext",
     {"capabilities": {"drop": ["ALL"]}}),
    ("security.run_as_user", 7, "spec securityContext runAsUser", 7),
    ("security.run_as_user", 0, "spec securityContext runAsNonRoot", None),
    ("security.run_as_user", None, "spec securityContext runAsNonRoot", True),
    ("security.run_as_non_root", False, "spec securityContext runAsNonRoot", None),
    ("security.seccomp_profile", None, "spec securityContext seccompProfile", None),
    ("security.service_account_token", True, "spec automountServiceAccountToken", None),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value", "path", "expected"), POD_FIELDS, ids=lambda item: str(item)[:40]
)
def test_cluster_field_stands_in_the_pods(
    kind: str, field: str, value: Any, path: str, expected: Any
) -> None:
    job = k8s_job(kind, {f"cluster.{field}": value})

    assert at(pod(job), path) == expected


def test_policies_of_hyperpod() -> None:
    spec = documents(full_job("hyperpod"))["job"]["spec"]

    assert spec["runPolicy"] == {
        "activeDeadlineSeconds": 86401, "cleanPodPolicy": "OnlyComplete",
        "faultDeadlineSeconds": 5, "jobMaxRetryCount": 10, "startupDeadlineSeconds": 6,
        "suspend": True, "ttlSecondsAfterFinished": 60, "workloadMode": "Deployment",
        "restartPolicy": {
            "evalPeriodSeconds": 1, "maxFullJobRestarts": 2, "numRestartBeforeFullJobRestart": 3,
            "maxNumRepeatOffendersToAvoid": 4, "scaleUpSnoozeTimeInSeconds": 3,
        },
        "logMonitoringConfiguration": [
            {"name": "a", "logPattern": "a", "expectedStartCutOffInSeconds": 1,
             "expectedRecurringFrequencyInSeconds": 2, "metricThreshold": -3, "operator": "gt",
             "metricEvaluationDataPoints": 4, "stopPattern": "b"},
            {"name": "b", "logPattern": "b"},
        ],
    }  # fmt: skip
    assert spec["elasticPolicy"] == {
        "minReplicas": 8, "maxReplicas": 16, "replicaIncrementStep": 8,
        "scalingTimeoutInSeconds": 3, "gracefulShutdownTimeoutInSeconds": 4,
        "faultyScaleDownTimeoutInSeconds": 5,
    }  # fmt: skip
    stays = documents(k8s_job("hyperpod", {"cluster.run_policy.ttl_s": -1}))["job"]["spec"]
    assert stays["runPolicy"]["ttlSecondsAfterFinished"] == -1
    (replicas,) = spec["replicaSpecs"]
    assert (replicas["spares"], replicas["maxReplicas"]) == (1, 16)


FAULTY = shipped_job("llama/llama3_tiny_checkpointless", "job")
FEATURE: dict[str, Any] = FAULTY.resilience.model_dump(mode="json")["checkpointless"]
CHECKPOINTLESS: dict[str, Any] = {
    "resources.shm_gib": 1,
    "resilience.checkpointless": {**FEATURE, "process_restarts_max": 9, "restart_window_s": 60},
}


@pytest.mark.parametrize(("standby", "retries", "expected"), [(0, None, 9), (2, 3, 3)])
def test_plain_job_that_recovers_starts_standby_nodes_and_failed_pods_again(
    standby: int, retries: int | None, expected: int
) -> None:
    feature = {**FEATURE, "process_restarts_max": 9, "standby_nodes": standby}
    changes = {"resilience.checkpointless": feature, "cluster.run_policy.retries_max": retries}
    job = k8s_job("job", {**CHECKPOINTLESS, **changes})

    spec = documents(job)["job"]["spec"]

    assert (spec["completions"], spec["parallelism"]) == (2 + standby, 2 + standby)
    # Each index counts alone: a failure of one delays no other one's next pod.
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (expected, 0)
    assert spec.get("backoffLimit") == retries
    assert spec["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize(
    ("changes", "retries"),
    [
        pytest.param({}, 6, id="none-is-given"),
        pytest.param({"trainer.max_restarts": 4}, 4, id="restarts-of-the-recipe"),
        pytest.param({"cluster.run_policy.retries_max": 0}, 0, id="none-as-asked-for"),
    ],
)
def test_the_operator_starts_a_run_again_and_not_for_ever(
    changes: dict[str, Any], retries: int
) -> None:
    spec = documents(k8s_job("hyperpod", changes))["job"]["spec"]

    assert spec["runPolicy"]["jobMaxRetryCount"] == retries


def test_cluster_restart_policy_comes_before_that_of_checkpointless() -> None:
    policy = {
        "eval_period_s": 7, "full_job_restarts_max": 1, "restarts_before_full_job": None,
        "repeat_offenders_to_avoid_max": None, "scale_up_snooze_s": None,
    }  # fmt: skip
    job = k8s_job("hyperpod", {**CHECKPOINTLESS, "cluster.run_policy.restart_policy": policy})

    assert documents(job)["job"]["spec"]["runPolicy"]["restartPolicy"] == {
        "evalPeriodSeconds": 7, "numRestartBeforeFullJobRestart": 9, "maxFullJobRestarts": 1,
    }  # fmt: skip


def test_policy_of_a_plain_job() -> None:
    spec = documents(full_job("job"))["job"]["spec"]
    stays = documents(k8s_job("job", {"cluster.run_policy.ttl_s": -1}))["job"]["spec"]

    expected = {"backoffLimit": 10, "activeDeadlineSeconds": 86401, "suspend": True}
    assert spec.items() >= {**expected, "ttlSecondsAfterFinished": 60}.items()
    assert not stays.keys() & {*expected, "ttlSecondsAfterFinished"}


def test_plain_job_has_no_field_newer_than_kubernetes_1_26() -> None:
    job = k8s_job("job", {
        "time_limit": "00:10:00", "cluster.run_policy.retries_max": 1,
        "cluster.run_policy.ttl_s": 1, "cluster.run_policy.suspend": True,
    })  # fmt: skip

    assert set(documents(job)["job"]["spec"]) <= {
        "completionMode", "completions", "parallelism", "backoffLimit", "activeDeadlineSeconds",
        "ttlSecondsAfterFinished", "suspend", "template", "podFailurePolicy",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_queue_is_asked_by_the_job_alone(kind: str) -> None:
    queue = {"cluster.queue": "q", "cluster.queue_priority": "p"}
    found = documents(k8s_job(kind, queue, "llama/llama3_tiny_checkpointless"))
    template = template_of(found)

    asked = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "p"}
    assert asked.items() <= found["job"]["metadata"]["labels"].items()
    assert not asked.keys() & found["ConfigMap"]["metadata"]["labels"].keys()
    assert not asked.keys() & template["metadata"]["labels"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_says_what_it_was_rendered_from(kind: str) -> None:
    job = k8s_job(kind, {"cluster.annotations": {"a/b": "c"}, "cluster.labels": {"team": "x"},
                         "cluster.namespace": "train"})  # fmt: skip

    found = documents(job)
    # What has to change before the job runs stands at the job alone.
    assert found["job"]["metadata"]["annotations"].pop("training-recipes/notes")
    for document in found.values():
        metadata = document["metadata"]
        assert (metadata["name"], metadata["namespace"]) == (job.name, "train")
        assert (metadata["labels"]["team"], metadata["annotations"]["a/b"]) == ("x", "c")
        assert metadata["annotations"]["training-recipes/digest"] == job.digest()


def test_huge_pages_bring_the_memory_request_that_kubernetes_wants_beside() -> None:
    job = k8s_job("job", {"resources.hugepages_2mi_mib": 64, "resources.shm_gib": 3})

    requests = at(pod(job), "spec containers 0 resources requests")

    assert requests == {"memory": "5Gi", "hugepages-2Mi": "64Mi"}


@pytest.mark.parametrize(
    ("nodes", "gpus", "devices", "efa", "expected"),
    [
        pytest.param(2, 8, 8, 32, 32, id="whole-instance"),
        pytest.param(1, 8, 8, 32, 32, id="whole-instance-alone"),
        pytest.param(2, 2, 8, 32, 8, id="quarter-of-an-instance"),
        pytest.param(2, 1, 8, 1, 1, id="share-below-one-where-nodes-talk"),
        pytest.param(1, 1, 8, 1, 0, id="share-below-one-alone"),
        pytest.param(2, 8, 8, 0, 0, id="instance-without-efa"),
    ],
)
def test_efa_devices_of_a_pod(nodes: int, gpus: int, devices: int, efa: int, expected: int) -> None:
    job = k8s_job("job", recipe=LARGE)
    trainer = job.trainer.model_copy(update={"num_devices": gpus})
    instance = job.instance.model_copy(update={"num_devices": devices, "num_efa": efa})

    assert efa_devices(trainer, instance, nodes) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_variables_come_from_the_recipe_secrets_and_the_pod_in_order(kind: str) -> None:
    job = k8s_job(kind, {
        "env": {"Z": "1", "A": "$(HOME) $5"},
        "cluster.secrets": {"TOKEN": {"name": "hub", "key": "token"}},
        "trainer.threads_per_worker": 3,
    })  # fmt: skip

    env = at(pod(job), "spec containers 0 env")

    assert [each["name"] for each in env] == sorted(each["name"] for each in env)
    expected = [
        {"name": "A", "value": "$$(HOME) $$5"},
        {"name": "OMP_NUM_THREADS", "value": "3"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "Z", "value": "1"},
    ]
    assert [each for each in env if not each["name"].startswith("LAUNCHER_")] == expected


def test_template_of_a_team_is_checked_like_ours() -> None:
    templates = dict(TEMPLATES)
    old = "imagePullPolicy: {{ cluster.image_pull_policy | json }}"
    templates["k8s/pod.yaml.j2"] = templates["k8s/pod.yaml.j2"].replace(
        old, "imagePullPolicy: Sometimes"
    )

    with pytest.raises(RecipeError, match=r"imagePullPolicy 'Sometimes'; allowed: 'Always'"):
        render_k8s(k8s_job("job"), templates)


@pytest.mark.parametrize("kind", KINDS)
def test_library_of_aws_finds_the_pods_own_daemon(kind: str) -> None:
    changes = {"resilience.tiered.http_port": 9200}

    found = pod(k8s_job(kind, changes, "llama/llama3_tiny_tiered"))["spec"]["hostAliases"]

    host = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
    assert found == [{"ip": "127.0.0.1", "hostnames": [host]}]


@pytest.mark.parametrize("kind", KINDS)
def test_network_policy_lets_the_jobs_own_pods_and_named_peers_connect(kind: str) -> None:
    peers = [{"namespace_labels": {}, "pod_labels": {"a": "b"}}, {"cidr": "10.0.0.0/8"}]
    found = documents(k8s_job(kind, {"cluster.network_policy_from": peers}))
    own = {"matchLabels": {"training-recipes/job": "llama3-tiny-pretrain"}}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "aws-hyperpod"}}
    }

    assert own["matchLabels"].items() <= template_of(found)["metadata"]["labels"].items()
    assert found["NetworkPolicy"]["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [
            {"podSelector": own},
            *([operator] if kind == "hyperpod" else []),
            {"namespaceSelector": {"matchLabels": {}}, "podSelector": {"matchLabels": {"a": "b"}}},
            {"ipBlock": {"cidr": "10.0.0.0/8"}},
        ]}],
    }  # fmt: skip
    for change in ({"cluster.network_policy": False}, {"cluster.host_network": True}):
        assert "NetworkPolicy" not in documents(k8s_job(kind, change))

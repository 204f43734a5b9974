"""What stands where in a manifest, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.clusters.k8s.manifest import render_k8s
from launcher.clusters.k8s.security import efa_devices
from launcher.errors import RecipeError
from tests.launcher.k8s_job import KINDS, LARGE, TINY, at, documents, k8s_job, pod, template_of
from tests.launcher.shipped import TEMPLATES, shipped_job

POD_FIELDS = [
    ("service_account", "trainer", "spec serviceAccountName", "trainer"),
    ("priority_class", "high", "spec priorityClassName", "high"),
    ("host_network", True, "spec hostNetwork", True),
    ("host_network", True, "spec dnsPolicy", "ClusterFirstWithHostNet"),
    ("termination_grace_s", 90, "spec terminationGracePeriodSeconds", 90),
    ("image_pull_secrets", ["a", "b"], "spec imagePullSecrets", [{"name": "a"}, {"name": "b"}]),
    ("labels", {"team": "x"}, "metadata labels team", "x"),
    ("annotations", {"a/b": "c: d"}, "metadata annotations a/b", "c: d"),
    ("node_selector", {"zone": "1"}, "spec nodeSelector", {"zone": "1"}),
    ("image", "r/i:1", "spec containers 0 image", "r/i:1"),
    ("image_pull_policy", "Never", "spec containers 0 imagePullPolicy", "Never"),
    ("secrets_from", ["s"], "spec containers 0 envFrom", [{"secretRef": {"name": "s"}}]),
    (
        "tolerations",
        [
            {"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute",
             "toleration_s": 30},
            {"operator": "Exists"},
        ],
        "spec tolerations",
        [
            {"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute",
             "tolerationSeconds": 30},
            {"operator": "Exists"},
        ],
    ),
    (
        "affinity.required",
        {"b": ["2", "3"], "a": ["1"]},
        "spec affinity nodeAffinity requiredDuringSchedulingIgnoredDuringExecution",
        {"nodeSelectorTerms": [{"matchExpressions": [
            {"key": "a", "operator": "In", "values": ["1"]},
            {"key": "b", "operator": "In", "values": ["2", "3"]},
        ]}]},
    ),
    (
        "affinity.preferred",
        [{"weight": 7, "labels": {"a": ["1"]}}, {"weight": 9, "labels": {"b": ["2"]}}],
        "spec affinity nodeAffinity preferredDuringSchedulingIgnoredDuringExecution",
        [
            {"weight": 7, "preference": {"matchExpressions": [
                {"key": "a", "operator": "In", "values": ["1"]}]}},
            {"weight": 9, "preference": {"matchExpressions": [
                {"key": "b", "operator": "In", "values": ["2"]}]}},
        ],
    ),
    (
        "affinity.same_topology",
        "topology.k8s.aws/network-node-layer-1",
        "spec affinity podAffinity preferredDuringSchedulingIgnoredDuringExecution",
        [{"weight": 100, "podAffinityTerm": {
            "topologyKey": "topology.k8s.aws/network-node-layer-1",
            "labelSelector": {"matchLabels": {"training-recipes/job": "llama3-tiny-pretrain"}},
        }}],
    ),
    ("security.dropped_capabilities", ["KILL"], "spec containers 0 securityContext capabilities",
     {"drop": ["KILL"]}),
    ("security.allow_privilege_escalation", True, "spec containers 0 securityContext",
     {"capabilities": {"drop": ["ALL"]}}),
    ("security.run_as_user", 7, "spec securityContext runAsUser", 7),
    ("security.run_as_user", 0, "spec securityContext runAsNonRoot", None),
    ("security.run_as_user", None, "spec securityContext runAsNonRoot", True),
    ("security.run_as_non_root", False, "spec securityContext runAsNonRoot", None),
    ("security.run_as_group", 7, "spec securityContext runAsGroup", 7),
    ("security.fs_group", 8, "spec securityContext fsGroup", 8),
    ("security.seccomp_profile", None, "spec securityContext seccompProfile", None),
    ("security.service_account_token", True, "spec automountServiceAccountToken", None),
    ("security.memory_limit_gib", 8, "spec containers 0 resources limits", {"memory": "8Gi"}),
    *(
        (
            f"probes.{name}", {"command": ["cat", "/x"], "period_s": 5},
            f"spec containers 0 {name}Probe",
            {"exec": {"command": ["cat", "/x"]}, "initialDelaySeconds": 0, "periodSeconds": 5,
             "timeoutSeconds": 1, "failureThreshold": 3},
        )
        for name in ("startup", "liveness", "readiness")
    ),
    (
        "volume_claims", [{"claim_name": "fsx", "mount_path": "/data", "read_only": True}],
        "spec volumes 1",
        {"name": "claim-0", "persistentVolumeClaim": {"claimName": "fsx", "readOnly": True}},
    ),
    (
        "volume_claims", [{"claim_name": "fsx", "mount_path": "/data"}],
        "spec containers 0 volumeMounts 1",
        {"name": "claim-0", "mountPath": "/data", "readOnly": False},
    ),
    (
        "host_paths", [{"path": "/nvme", "mount_path": "/scratch", "type": "DirectoryOrCreate"}],
        "spec volumes 1",
        {"name": "host-0", "hostPath": {"path": "/nvme", "type": "DirectoryOrCreate"}},
    ),
    (
        "host_paths", [{"path": "/nvme", "mount_path": "/scratch", "read_only": True}],
        "spec containers 0 volumeMounts 1",
        {"name": "host-0", "mountPath": "/scratch", "readOnly": True},
    ),
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


HYPERPOD_POLICY = [
    ("cluster.run_policy.clean_pod_policy", "OnlyComplete", "cleanPodPolicy", "OnlyComplete"),
    ("cluster.run_policy.retries_max", 4, "jobMaxRetryCount", 4),
    ("trainer.max_restarts", 3, "jobMaxRetryCount", 3),
    ("time_limit", "1-00:00:01", "activeDeadlineSeconds", 86401),
    ("cluster.run_policy.fault_deadline_s", 5, "faultDeadlineSeconds", 5),
    ("cluster.run_policy.startup_deadline_s", 6, "startupDeadlineSeconds", 6),
    ("cluster.run_policy.ttl_s", -1, "ttlSecondsAfterFinished", -1),
    ("cluster.run_policy.suspend", True, "suspend", True),
    ("cluster.run_policy.workload_mode", "Deployment", "workloadMode", "Deployment"),
    (
        "cluster.run_policy.restart_policy",
        {"eval_period_s": 1, "full_job_restarts_max": 2, "restarts_before_full_job": 3,
         "repeat_offenders_to_avoid_max": 4, "scale_up_snooze_s": 5},
        "restartPolicy",
        {"evalPeriodSeconds": 1, "maxFullJobRestarts": 2, "numRestartBeforeFullJobRestart": 3,
         "maxNumRepeatOffendersToAvoid": 4, "scaleUpSnoozeTimeInSeconds": 5},
    ),
    (
        "cluster.run_policy.log_monitoring",
        [
            {"name": "steps", "pattern": r".*step (\d+)", "start_cutoff_s": 1, "recurring_s": 2,
             "metric_threshold": -3, "operator": "lteq", "metric_points": 4,
             "stop_pattern": "done"},
            {"name": "start", "pattern": "begin"},
        ],
        "logMonitoringConfiguration",
        [
            {"name": "steps", "logPattern": r".*step (\d+)", "expectedStartCutOffInSeconds": 1,
             "expectedRecurringFrequencyInSeconds": 2, "metricThreshold": -3, "operator": "lteq",
             "metricEvaluationDataPoints": 4, "stopPattern": "done"},
            {"name": "start", "logPattern": "begin"},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "name", "expected"), HYPERPOD_POLICY, ids=lambda item: str(item)[:40]
)
def test_run_policy_of_hyperpod(field: str, value: Any, name: str, expected: Any) -> None:
    spec = documents(k8s_job("hyperpod", {field: value}))["job"]["spec"]

    assert spec["runPolicy"][name] == expected


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


def test_checkpointless_sets_the_restart_limits_of_hyperpod() -> None:
    spec = documents(k8s_job("hyperpod", CHECKPOINTLESS))["job"]["spec"]

    assert spec["runPolicy"]["restartPolicy"] == {
        "evalPeriodSeconds": 60, "numRestartBeforeFullJobRestart": 9, "maxFullJobRestarts": 1,
    }  # fmt: skip
    assert spec["runPolicy"]["jobMaxRetryCount"] == 9


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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param({"nodes_step": 1}, {"replicaIncrementStep": 1}, id="step"),
        pytest.param({"nodes_allowed": [1, 2]}, {"replicaDiscreteValues": [1, 2]}, id="sizes"),
    ],
)
def test_elastic_policy_of_hyperpod(sizes: dict[str, Any], expected: dict[str, Any]) -> None:
    elastic = {
        "nodes_min": 1, "nodes_max": 2, "nodes_step": None, "nodes_allowed": None,
        "may_lose_steps": False, "hold_s": 1.0, "scale_up_snooze_s": 2.1,
        "scaling_timeout_s": 3, "graceful_shutdown_timeout_s": 4, "faulty_scale_down_timeout_s": 5,
    }  # fmt: skip
    tiered = shipped_job(TINY, "hyperpod").model_dump(mode="json")["resilience"]["tiered"]
    changes = {"resilience.tiered": tiered, "resilience.elastic": elastic | sizes}
    job = k8s_job("hyperpod", changes)

    spec = documents(job)["job"]["spec"]

    assert spec["elasticPolicy"] == {
        "minReplicas": 1, "maxReplicas": 2, "scalingTimeoutInSeconds": 3,
        "gracefulShutdownTimeoutInSeconds": 4, "faultyScaleDownTimeoutInSeconds": 5, **expected,
    }  # fmt: skip
    assert spec["replicaSpecs"][0]["maxReplicas"] == 2
    assert spec["runPolicy"]["restartPolicy"] == {
        "evalPeriodSeconds": 3600, "scaleUpSnoozeTimeInSeconds": 3, "maxFullJobRestarts": 1,
    }  # fmt: skip


def test_replicas_of_hyperpod() -> None:
    spec = documents(k8s_job("hyperpod", {"cluster.num_spares": 3}, LARGE))["job"]["spec"]

    assert spec["nprocPerNode"] == "8"
    assert len(spec["replicaSpecs"]) == 1
    assert at(spec, "replicaSpecs 0 name") == "pods"
    assert at(spec, "replicaSpecs 0 replicas") == 16
    assert at(spec, "replicaSpecs 0 spares") == 3


JOB_POLICY = [
    ("cluster.run_policy.retries_max", 4, "backoffLimit", 4),
    ("cluster.run_policy.retries_max", None, "backoffLimit", None),
    ("time_limit", "00:10:00", "activeDeadlineSeconds", 600),
    ("cluster.run_policy.ttl_s", 30, "ttlSecondsAfterFinished", 30),
    ("cluster.run_policy.ttl_s", -1, "ttlSecondsAfterFinished", None),
    ("cluster.run_policy.suspend", True, "suspend", True),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), JOB_POLICY, ids=str)
def test_run_policy_of_a_plain_job(field: str, value: Any, name: str, expected: Any) -> None:
    assert documents(k8s_job("job", {field: value}))["job"]["spec"].get(name) == expected


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
        assert document["metadata"] == {
            "name": job.name,
            "namespace": "train",
            "labels": {
                "app.kubernetes.io/managed-by": "training-recipes",
                "app.kubernetes.io/name": job.name,
                "team": "x",
            },
            "annotations": {
                "a/b": "c",
                "training-recipes/description": job.recipe.description,
                "training-recipes/digest": job.digest(),
                "training-recipes/recipe": TINY,
                "training-recipes/version": "1",
            },
        }


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

    own = {
        "hyperpod": [
            {"name": "LAUNCHER_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "LAUNCHER_POD_NAME",
             "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "OMP_NUM_THREADS", "value": "3"},
        ],
        "job": [
            {"name": "LAUNCHER_JOB_UID",
             "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}}},
            {"name": "LAUNCHER_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "OMP_NUM_THREADS", "value": "3"},
        ],
    }  # fmt: skip
    assert env == [
        {"name": "A", "value": "$$(HOME) $$5"},
        *own["job" if kind == "trainjob" else kind],
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "Z", "value": "1"},
    ]


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

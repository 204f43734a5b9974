"""What a cluster may do with the pods, and what they may do on their nodes."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.support import notes
from tests.launcher.k8s_job import KINDS, LARGE, TINY, at, k8s_job, pod
from tests.launcher.shipped import shipped_job


@pytest.mark.parametrize("kind", KINDS)
def test_pods_ask_not_to_be_moved_unless_their_cluster_says_otherwise(kind: str) -> None:
    name = "karpenter.sh/do-not-disrupt"
    ours = {name: "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}

    assert at(pod(k8s_job(kind)), "metadata annotations") == ours

    moved = k8s_job(kind, {"cluster.annotations": {name: "false", "a/b": "c"}})
    assert at(pod(moved), "metadata annotations") == ours | {name: "false", "a/b": "c"}


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        pytest.param(8, {}, 179, id="whole-instance"),
        pytest.param(2, {}, 44, id="quarter-of-an-instance"),
        pytest.param(8, {"resources.num_cpus": 96}, 96, id="as-asked"),
        pytest.param(8, {"instance.type": "dgx"}, None, id="machine-of-their-own"),
    ],
)
def test_pod_on_an_instance_of_aws_has_its_devices_share_of_the_cpus(
    gpus: int, changes: dict[str, Any], expected: int | None
) -> None:
    changed = {"trainer.num_devices": gpus, "trainer.tensor_parallel": gpus, **changes}
    job = k8s_job("job", changed, LARGE)

    assert at(pod(job), "spec containers 0 resources requests cpu") == expected


PATH = {"path": "/a", "mount_path": "/b"}
OWN = "cluster.security"
ROOT = {f"{OWN}.run_as_user": 0}
PRIVILEGED = {
    f"{OWN}.privileged": True,
    f"{OWN}.allow_privilege_escalation": True,
    f"{OWN}.dropped_capabilities": [],
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, None, id="no-user-but-root-gets-it"),
        pytest.param(ROOT, ["IPC_LOCK"], id="efa"),
        pytest.param({**ROOT, "instance.num_efa": 0}, None, id="no-efa"),
        pytest.param({**ROOT, "cluster.security.capabilities": []}, None, id="refused"),
        pytest.param({**ROOT, **PRIVILEGED}, None, id="privileged-has-it"),
        pytest.param({**ROOT, f"{OWN}.capabilities": ["KILL"]}, ["KILL"], id="as-asked"),
    ],
)
def test_pod_of_root_with_efa_may_lock_memory(changes: dict[str, Any], expected: object) -> None:
    spec = pod(k8s_job("job", changes, LARGE))["spec"]

    assert at(spec, "containers 0 securityContext capabilities add") == expected


def test_privileged_workers_have_a_daemon_without_rights() -> None:
    spec = pod(k8s_job("job", PRIVILEGED, "llama/llama3_tiny_tiered"))["spec"]

    assert at(spec, "containers 0 securityContext") == {"privileged": True}
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert at(spec, "initContainers 0 securityContext") == locked


NAMES = r"AUDIT_CONTROL\|.*\|WAKE_ALARM"
LIMIT, IN_SHM = f"{OWN}.memory_limit_gib", {"resources.shm_gib": 9}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("job", {f"{OWN}.privileged": True},
         "privileged true gives .*; allowed with it: allow_privilege_escalation true and dropped"),
        ("job", PRIVILEGED | {f"{OWN}.dropped_capabilities": ["ALL"]}, "allowed with it: "),
        ("job", {**ROOT, f"{OWN}.capabilities": ["CAP_IPC_LOCK"]}, f"allowed: {NAMES}"),
        ("job", {**ROOT, f"{OWN}.capabilities": ["ALL"]}, f"allowed: {NAMES}"),
        ("job", {f"{OWN}.dropped_capabilities": ["NOSUCHCAP"]}, rf"allowed: ALL\|{NAMES}"),
        ("job", {f"{OWN}.capabilities": ["KILL"]}, r"\['KILL'\] needs run_as_user 0: only root"),
        ("job", {**ROOT, f"{OWN}.capabilities": ["KILL"], f"{OWN}.dropped_capabilities": ["KILL"]},
         r"capabilities and dropped_capabilities have \['KILL'\]; allowed: one"),
        ("job", {LIMIT: 8, **IN_SHM}, f"{LIMIT} 8; allowed: 9, .* to 4096, which is instance"),
        ("job", {LIMIT: 19, "resources.memory_gib": 20}, f"{LIMIT} 19; allowed: 20, which"),
        ("job", {LIMIT: 10, "resources.hugepages_2mi_mib": 2, **IN_SHM}, "10; allowed: 1[1-9], "),
        ("job", {LIMIT: 4097}, f"{LIMIT} 4097; allowed: 1, .* to 4096, which is instance.memory"),
        ("hyperpod", {LIMIT: 1}, f"{LIMIT} 1; allowed: 3, which is requested or in /dev/shm"),
    ],
)  # fmt: skip
def test_rights_and_limits_that_no_pod_can_have_are_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    recipe = "llama/llama3_tiny_tiered" if kind == "hyperpod" else TINY

    with pytest.raises(ValueError, match=f"(?m){message}"):
        k8s_job(kind, changes, recipe)


@pytest.mark.parametrize(
    ("changes", "level", "keys"),
    [
        pytest.param(
            {"cluster.host_network": True, "cluster.host_paths": [PATH]},
            "privileged", "cluster.host_network, cluster.host_paths", id="of-the-node",
        ),
        pytest.param(ROOT, "privileged", "the capability IPC_LOCK", id="root-with-efa"),
        pytest.param(
            {**PRIVILEGED, "cluster.security.seccomp_profile": "Unconfined"},
            "privileged", "cluster.security.privileged, cluster.security.seccomp_profile", id="all",
        ),
        pytest.param(
            {**ROOT, "instance.num_efa": 0}, "baseline", "cluster.security.run_as_user", id="root"
        ),
    ],
)  # fmt: skip
def test_what_level_restricted_refuses_is_named(
    changes: dict[str, Any], level: str, keys: str
) -> None:
    expected = (
        f"the pods need a namespace with PodSecurity's level {level!r}, or without one, for {keys}"
    )

    assert expected in notes(k8s_job("job", changes, LARGE))


@pytest.mark.parametrize(("recipe", "kind", "overrides"), [
    pytest.param(TINY, "job", ["resilience.tiered=null"], id="no-copies"),
    pytest.param("llama/llama3_tiny_tiered", "hyperpod", [], id="hyperpods-own-placement"),
    pytest.param("llama/llama3_tiny_tiered", "job",
                 ["trainer.num_nodes=1", "resilience.tiered.ram.replicas=0",
                  "resilience.tiered.ram.domains_min=1"], id="one-node"),
])  # fmt: skip
def test_pods_without_copies_for_each_other_go_anywhere(
    recipe: str, kind: str, overrides: list[str]
) -> None:
    spec = pod(shipped_job(recipe, kind, overrides))["spec"]

    assert "affinity" not in spec
    assert "topologySpreadConstraints" not in spec

"""What a cluster may do with the pods, and what they may do on their nodes."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, {"capabilities": {"add": ["IPC_LOCK"]}}, id="efa"),
        pytest.param({"instance.num_efa": 0}, None, id="no-efa"),
        pytest.param({"cluster.security.capabilities": []}, None, id="refused"),
        pytest.param(
            {"cluster.security.privileged": True}, {"privileged": True}, id="privileged-has-it"
        ),
    ],
)
def test_pod_with_efa_may_lock_memory(changes: dict[str, Any], expected: object) -> None:
    spec = pod(k8s_job("job", changes, LARGE))["spec"]

    assert at(spec, "containers 0 securityContext") == expected


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

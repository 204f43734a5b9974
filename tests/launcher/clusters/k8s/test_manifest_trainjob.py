"""A job for Kubeflow's Trainer: its runtime, the names of its pods, and what it is refused."""

from __future__ import annotations

import re

import pytest
import yaml

from launcher.clusters.k8s.check import check_manifest, indexed_job, read_documents
from launcher.clusters.k8s.growth import growth_job
from launcher.clusters.k8s.manifest import GROWTH
from launcher.errors import RecipeError
from tests.launcher.k8s_job import documents, k8s_job, manifest
from tests.launcher.shipped import rendered, shipped_job

TIERED = "llama/llama3_tiny_tiered"
ELASTIC = "llama/llama3_tiny_elastic"
CHECKPOINTLESS = "llama/llama3_tiny_checkpointless"
INNER = "llama3-tiny-checkpointless-node-0"


def test_pods_of_the_runtime_are_those_of_a_plain_job_but_for_their_names() -> None:
    found, plain = (documents(k8s_job(kind, {}, CHECKPOINTLESS)) for kind in ("trainjob", "job"))
    runtime, job = found["TrainingRuntime"]["spec"], plain["Job"]["spec"]

    (part,) = runtime["template"]["spec"]["replicatedJobs"]
    assert runtime["mlPolicy"] == {"numNodes": 2}, "a policy of a framework sets variables"
    own = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (part["name"], part["template"]["metadata"]) == ("node", {"labels": own})
    label = part["template"]["spec"]["template"]["metadata"]["labels"]
    assert label.pop("jobset.sigs.k8s.io/jobset-name") == "llama3-tiny-checkpointless"
    ttl_s = job.pop("ttlSecondsAfterFinished")
    assert runtime["template"]["spec"]["ttlSecondsAfterFinished"] == ttl_s
    assert part["template"]["spec"] == job


def test_agents_and_daemons_find_each_other_by_the_names_that_jobset_gives() -> None:
    found = documents(k8s_job("trainjob", {}, CHECKPOINTLESS))

    assert "Service" not in found, "JobSet makes it"
    texts = found["ConfigMap"]["data"]
    host = f"{INNER}-1.llama3-tiny-checkpointless"
    assert f"{INNER}-1={host}:9201" in texts["memoryd.peers"].splitlines()
    assert f"rdzv_host={INNER}-$node.llama3-tiny-checkpointless\n" in texts["start.sh"]
    for name, option in (("start.sh", "--node-name"), ("memoryd.sh", "--node")):
        assert f'{option}={INNER}-"$JOB_COMPLETION_INDEX"' in texts[name]


def test_what_a_trainjob_has_fields_for_stands_there() -> None:
    changes = {"time_limit": "01:00:00", "cluster.run_policy.suspend": True}
    found = documents(k8s_job("trainjob", changes))

    own = {"activeDeadlineSeconds": 3600, "suspend": True}
    (part,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert own.items() <= found["TrainJob"]["spec"].items()
    assert not own.keys() & part["template"]["spec"].keys()


def test_further_nodes_have_the_names_and_the_service_of_the_others() -> None:
    texts = rendered(shipped_job(ELASTIC, "trainjob"))

    growth, *_ = yaml.safe_load_all(texts[GROWTH])
    spec = growth["spec"]["template"]["spec"]
    assert growth["metadata"]["name"] == "llama3-tiny-elastic-g1"
    (owner,) = growth["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Job", "llama3-tiny-elastic-node-0")
    assert (spec["hostname"], spec["subdomain"]) == (f"{owner['name']}-1", "llama3-tiny-elastic")
    labels = growth["spec"]["template"]["metadata"]["labels"]
    assert labels["jobset.sigs.k8s.io/jobset-name"] == "llama3-tiny-elastic"
    assert labels["training-recipes/job"] == "llama3-tiny-elastic"
    assert f"get job {owner['name']} -o" in texts[GROWTH]


def test_further_nodes_wait_in_the_queue_of_the_run() -> None:
    text = manifest(k8s_job("trainjob", {"cluster.queue": "q"}, ELASTIC))

    labels = growth_job(indexed_job(read_documents(text)), 2, "1-2")["metadata"]["labels"]

    assert labels["kueue.x-k8s.io/queue-name"] == "q"


@pytest.mark.parametrize(
    ("changes", "recipe", "words"),
    [
        ({"cluster.queue": "q", "resilience.tiered.store": None}, TIERED,
         "cluster.queue 'q' needs resilience.tiered.store with cluster.job_kind 'trainjob': Kueue"),
        ({"cluster.queue": "q", "resilience.tiered": None}, TIERED,
         "cluster.queue 'q' needs resilience.tiered with"),
        ({"name": "a" * 50}, TIERED, f"the pod '{'a' * 50}-node-0-1-xxxxx' has 65 characters"),
        ({"name": "1a"}, TIERED, "run.name '1a' begins with a digit"),
        ({"cluster.num_spares": 1}, TIERED, "cluster.num_spares needs cluster.job_kind 'hyperpod'"),
    ],
)  # fmt: skip
def test_what_a_trainjob_cannot_do_is_refused(
    changes: dict[str, object], recipe: str, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        k8s_job("trainjob", changes, recipe)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind: TrainingRuntime\n    name: "llama', 'kind: TrainingRuntime\n    name: "lama',
         "TrainJob.spec.runtimeRef.name 'lama3-tiny-pretrain'; allowed: the manifest's one"),
        ('- name: "node"\n          template', '- name: "nodes"\n          template',
         "TrainingRuntime has no replicated job 'node'"),
        ('subdomain: "llama', 'subdomain: "lama', "Job.spec.template.spec.subdomain 'lama3"),
        ("numNodes: 2", "numNodes: 0", "TrainingRuntime.spec.mlPolicy.numNodes 0; allowed: a wh"),
        ("  runtimeRef:", "  runtimeRefs:", "TrainJob.spec.runtimeRef is missing"),
        ("completionMode: Indexed", "completionMode: Indexd",
         "replicatedJobs[0].template.spec.completionMode 'Indexd'; allowed: "),
        ("restartPolicy: Never", "restartPolicy: Always",
         "template.spec.template.spec.restartPolicy 'Always'; allowed: 'Never', 'OnFailure'"),
    ],
)  # fmt: skip
def test_a_template_whose_parts_do_not_fit_is_refused(old: str, new: str, words: str) -> None:
    text = manifest(k8s_job("trainjob"))
    assert old in text

    with pytest.raises(RecipeError, match=re.escape(words)):
        check_manifest(text.replace(old, new))

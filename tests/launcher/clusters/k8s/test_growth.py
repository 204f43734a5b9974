"""The Jobs of an elastic run's further nodes: which there are to be, and what is in them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
import yaml

from launcher.clusters.k8s.check import indexed_job, read_documents
from launcher.clusters.k8s.growth import (
    OWNER_UID,
    GrowthJob,
    GrowthPlan,
    growth_job,
    growth_range,
    plan_growth_jobs,
    read_growth_jobs,
    time_left_s,
)
from launcher.clusters.k8s.manifest import GROWTH, MANIFEST
from launcher.errors import RecipeError
from launcher.job import Job
from tests.launcher.k8s_job import at, documents
from tests.launcher.shipped import TEMPLATES, rendered, shipped_job, untiered_job

ELASTIC = "llama/llama3_tiny_elastic"
NAME = "llama3-tiny-elastic"


def elastic_job(*overrides: str) -> Job:
    """Return a job of one to four nodes that begins with three, without checkpoint daemons."""
    return untiered_job(ELASTIC, "job", ["resilience.elastic.may_lose_steps=true", *overrides])


def growth_of(job: Job, index: int, uid: str = "1-2") -> dict[str, Any]:
    return growth_job(documents(job)["job"], index, uid)


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


# ---- which are created, and which are deleted

UP = [GrowthJob(index=1, is_ready=True), GrowthJob(index=2, is_ready=True)]


@pytest.mark.parametrize(
    ("present", "wanted", "plan"),
    [
        pytest.param([], 2, GrowthPlan(create=(1, 2)), id="from-the-fewest"),
        pytest.param(UP, 2, GrowthPlan(), id="nothing-to-do"),
        pytest.param(UP[1:], 2, GrowthPlan(create=(1,)), id="the-rest-of-a-call"),
        pytest.param(UP, 0, GrowthPlan(delete=(1, 2)), id="to-the-fewest"),
        pytest.param(UP, 1, GrowthPlan(delete=(2,)), id="the-last-goes"),
        pytest.param(
            [GrowthJob(index=1), UP[1]], 1, GrowthPlan(delete=(1,)), id="who-does-not-run-goes"
        ),
        pytest.param(
            [GrowthJob(index=1, is_ready=True, created="2026-02-01T09:00:00Z"),
             GrowthJob(index=2, is_ready=True, created="2026-01-31T10:00:00Z")], 1,
            GrowthPlan(delete=(1,)), id="a-low-index-that-was-given-again-came-last",
        ),
        pytest.param(
            [UP[0], GrowthJob(index=2, is_going=True)], 2, GrowthPlan(create=(3,)),
            id="another-for-one-that-goes",
        ),
        pytest.param(
            [UP[0], GrowthJob(index=2, is_going=True)], 3,
            GrowthPlan(create=(3,), num_missing=1), id="name-that-is-not-free",
        ),
        pytest.param(
            [UP[0], GrowthJob(index=2, has_ended=True)], 2,
            GrowthPlan(create=(3,), delete=(2,)), id="one-that-has-ended-counts-no-more",
        ),
        pytest.param(
            [GrowthJob(index=2, has_ended=True, is_going=True)], 0, GrowthPlan(), id="is-going",
        ),
    ],
)  # fmt: skip
def test_what_is_done_for_a_size(present: list[GrowthJob], wanted: int, plan: GrowthPlan) -> None:
    assert plan_growth_jobs(present, wanted, range(1, 4)) == plan


@pytest.mark.parametrize("wanted", range(4))
@pytest.mark.parametrize("num_done", range(4))
def test_every_size_is_reached_from_any_part_of_it(wanted: int, num_done: int) -> None:
    present = [GrowthJob(index=index) for index in (1, 2, 3)[:num_done]]

    plan = plan_growth_jobs(present, wanted, range(1, 4))
    left = {each.index for each in present} - set(plan.delete) | set(plan.create)
    again = plan_growth_jobs([GrowthJob(index=each) for each in left], wanted, range(1, 4))

    assert len(left) == wanted
    assert again == GrowthPlan()


def test_jobs_are_read_as_the_cluster_has_them() -> None:
    def found(index: int, owner: str = "1-2", **status: Any) -> dict[str, Any]:
        labels = {"training-recipes/node": str(index)}
        return {"metadata": {"labels": labels, "ownerReferences": [{"uid": owner}]},
                "status": status}  # fmt: skip

    first, going = found(1, ready=1, active=1), found(4)
    first["metadata"]["creationTimestamp"] = "2026-01-31T10:00:00Z"
    going["metadata"]["deletionTimestamp"] = "now"
    failed = found(3, conditions=[{"type": "Failed", "status": "True"}])

    jobs = read_growth_jobs([first, found(2), failed, going], "1-2")

    assert jobs == [
        GrowthJob(index=1, is_ready=True, created="2026-01-31T10:00:00Z"),
        GrowthJob(index=2),
        GrowthJob(index=3, has_ended=True),
        GrowthJob(index=4, is_going=True),
    ]
    assert read_growth_jobs([found(1, owner="of-before")], "1-2")[0].is_going


# ---- what is in them


def test_a_further_node_is_a_pod_of_the_run_under_its_own_index() -> None:
    job = elastic_job()
    base, growth = documents(job)["job"], growth_of(job, 2)

    assert growth["metadata"]["name"] == f"{NAME}-g2"
    assert growth["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": NAME, "uid": "1-2"}
    ]
    assert (growth["spec"]["completions"], growth["spec"]["parallelism"]) == (1, 1)
    assert "completionMode" not in growth["spec"]
    pod, of_base = growth["spec"]["template"]["spec"], base["spec"]["template"]["spec"]
    # The name under which the others look for it, in the one Service.
    assert (pod["hostname"], pod["subdomain"]) == (f"{NAME}-2", NAME)
    assert pod["volumes"] == of_base["volumes"]
    assert container_of(growth)["command"] == container_of(base)["command"]
    env = {each["name"]: each.get("value") for each in container_of(growth)["env"]}
    assert (env["JOB_COMPLETION_INDEX"], env["LAUNCHER_JOB_UID"]) == ("2", "1-2")
    assert set(env) - {each["name"] for each in container_of(base)["env"]} == {
        "JOB_COMPLETION_INDEX"
    }


def test_base_has_the_fewest_nodes_and_the_service_finds_all() -> None:
    job = elastic_job("resilience.elastic.nodes_min=2")
    found = documents(job)
    service = found["Service"]["spec"]["selector"]

    assert found["Job"]["spec"]["completions"] == found["Job"]["spec"]["parallelism"] == 2
    assert growth_range(job) == range(2, 4)
    for each in (found["Job"], growth_of(job, 3)):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert service.items() <= labels.items()


@pytest.mark.parametrize("grace_s", [60, 600])
def test_pods_live_for_as_long_as_their_agents_may_take_to_leave(grace_s: int) -> None:
    job = elastic_job(f"cluster.termination_grace_s={grace_s}")
    text = documents(job)["ConfigMap"]["data"]["start.sh"]

    assert f"--grace-s={grace_s - 5}" in text
    for each in (documents(job)["job"], growth_of(job, 1)):
        assert at(each, "spec template spec terminationGracePeriodSeconds") == grace_s


@pytest.mark.parametrize(("own", "found"), [("low", "low"), ("null", "high")])
def test_further_nodes_have_a_priority_class_of_their_own(own: str, found: str) -> None:
    job = elastic_job("cluster.priority_class=high", f"cluster.growth_priority_class={own}")
    first, second = read_documents(rendered(job)[GROWTH])

    assert at(documents(job)["job"], "spec template spec priorityClassName") == "high"
    for each in (first, second):
        assert at(each, "spec template spec priorityClassName") == found


def test_a_job_of_hyperpods_operator_has_no_further_jobs_with_a_class() -> None:
    with pytest.raises(
        RecipeError, match=r"cluster\.growth_priority_class needs cluster\.job_kind 'j"
    ):
        shipped_job(ELASTIC, "hyperpod", ["cluster.growth_priority_class=low"])


def test_rendered_growth_jobs_are_those_that_start() -> None:
    """Of three nodes one is the fewest; a fourth may come later."""
    job = elastic_job("+cluster.annotations={odd: \"a: 'b' # \\u00e9\", bare: 'y'}")
    files = rendered(job)
    found = read_documents(files[GROWTH])

    base = indexed_job(read_documents(files[MANIFEST]))
    assert found == [growth_job(base, index, OWNER_UID) for index in (1, 2)]
    assert files[GROWTH].replace(OWNER_UID, "1-2").count("1-2") == 2 * 2 + 1
    assert GROWTH not in rendered(elastic_job("resilience.elastic.nodes_min=3"))
    assert GROWTH not in rendered(untiered_job("llama/llama3_tiny_checkpointless", "job"))
    assert GROWTH not in rendered(shipped_job(ELASTIC, "hyperpod"))


def test_standby_nodes_are_further_nodes_at_the_last_size() -> None:
    job = elastic_job("resilience.elastic.nodes_max=3", "resilience.checkpointless.standby_nodes=1")

    assert [each["metadata"]["name"] for each in read_documents(rendered(job)[GROWTH])] == [
        f"{NAME}-g{index}" for index in (1, 2, 3)
    ]
    assert [job.num_nodes_at(size) for size in (1, 2, 3)] == [1, 2, 4]


def test_a_template_of_the_teams_own_is_that_of_further_nodes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TEMPLATES["k8s/job.yaml.j2"]
    monkeypatch.setitem(TEMPLATES, "k8s/job.yaml.j2", text.replace(
        "  template:\n", "  manualSelector: false\n  template:\n"))  # fmt: skip

    assert growth_of(elastic_job(), 1)["spec"]["manualSelector"] is False


def test_name_of_a_growth_job_is_not_too_long() -> None:
    name = "a" * 61

    with pytest.raises(RecipeError, match=rf"the Job '{name}-g3' has 64 characters; allowed: 63"):
        elastic_job(f"run.name={name}")


def test_time_limit_of_a_run_is_that_of_nodes_that_come_later() -> None:
    job = elastic_job("time_limit=01:00:00")
    base = documents(job)["job"]
    began = datetime.fromisoformat("2026-11-26T10:00:00+00:00").timestamp()
    running = {**base, "status": {"startTime": "2026-11-26T10:00:00Z"}}

    assert time_left_s(base, began) is None
    assert time_left_s(running, began + 600.5) == 2999
    assert time_left_s(running, began + 9000) == 1
    assert time_left_s(documents(elastic_job())["job"], began) is None
    later = growth_job(base, 1, "1-2", limit_s=2999)
    assert later["spec"]["activeDeadlineSeconds"] == 2999
    assert growth_of(job, 1)["spec"]["activeDeadlineSeconds"] == 3600


def test_growth_file_says_how_it_is_applied_by_hand() -> None:
    text = rendered(elastic_job())[GROWTH]

    assert f'sed "s/{OWNER_UID}/$(kubectl -n default get job {NAME} -o jsonpath=' in text
    assert all(isinstance(each, dict) for each in yaml.safe_load_all(text))
    assert json.dumps(read_documents(text)).count(OWNER_UID) == 2 * 2

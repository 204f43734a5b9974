"""What kubectl prints, and what is read from it. The objects are cut down to what is looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.k8s.objects import unix_s
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.kubernetes import KubernetesRuns
from launcher.clusters.running.pods import (
    OUT_OF_SERVICE,
    pods_that_wait,
    read_objects,
    warning_words,
)
from launcher.commands.sight import sight_of
from launcher.commands.status import status_lines
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.standing import JobStatus, Phase
from resilience.event_files import event_files
from resilience.events import EventLog
from tests.launcher.k8s_job import k8s_job

_TIME = "2026-11-28T11:15:02Z"
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
}
CRASHED = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"},
    "last": {"exitCode": 1, "message": "Traceback\nmemoryd: /token is open to others\x1b[0m\n"},
}
LAST = "memoryd: /token is open to others\\x1b[0m"
PULL = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}


def job(*conditions: Mapping[str, str], **metadata: str) -> str:
    status = {"conditions": list(conditions)}
    return json.dumps({"kind": "Job", "metadata": {"uid": "1", **metadata}, "status": status})


def pod(
    phase: str,
    conditions: Sequence[Mapping[str, str]] = (),
    state: Mapping[str, Any] | None = None,
    node: str = "",
    name: str = "a-0",
) -> dict[str, Any]:
    last = {"terminated": state["last"]} if state and "last" in state else {}
    containers = [{"name": "node", "state": state, "lastState": last}] if state else []
    status = {"phase": phase, "conditions": list(conditions), "containerStatuses": containers}
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


GOING = pod("Running", node="n1") | {"metadata": {"name": "a-0", "deletionTimestamp": _TIME}}


@pytest.mark.parametrize(
    ("job_text", "pods", "phase", "why"),
    [
        pytest.param("", [], Phase.FORGOTTEN, "the cluster has no such job any more", id="gone"),
        pytest.param("", [GOING], Phase.RUNNING, "it is deleted, and its pods are ending",
                     id="pods-end"),
        pytest.param("", [pod("Failed")], Phase.FORGOTTEN, "the cluster has no such job any more",
                     id="pods-have-ended"),
        pytest.param(job(uid="2"), [], Phase.FORGOTTEN,
                     "the cluster has a job of this name that was created later", id="another"),
        pytest.param(job(), [], Phase.QUEUED, "no pod has been made yet", id="no-pods"),
        pytest.param(job({"type": "Suspended", "status": "True"}), [], Phase.QUEUED,
                     "it is suspended, as by a queue", id="suspended"),
        pytest.param(job(), [pod("Pending", [UNSCHEDULABLE])], Phase.QUEUED,
                     f"Unschedulable: {UNSCHEDULABLE['message']}", id="no-room"),
        pytest.param(job(), [pod("Pending", state={"waiting": PULL})], Phase.QUEUED,
                     f"ImagePullBackOff: {PULL['message']}", id="no-image"),
        pytest.param(job(), [pod("Pending", state=CRASHED)], Phase.QUEUED,
                     f"CrashLoopBackOff: back-off 10s; node: {LAST}", id="last-line-of-a-crash"),
        pytest.param(job(), [pod("Pending", state={**CRASHED, "last": {"reason": "OOMKilled"}})],
                     Phase.QUEUED, "CrashLoopBackOff: back-off 10s; node: killed for taking more "
                     "memory than its limit (OOMKilled)", id="killed-for-memory"),
        pytest.param(job(), [pod("Running", state={"terminated": CRASHED["last"]})], Phase.RUNNING,
                     f"a-0 ended with exit status 1; node: {LAST}", id="last-line-of-a-failure"),
        pytest.param(job(), [pod("Running", node="n1"), pod("Pending", name="a-1")],
                     Phase.RUNNING, "", id="running"),
        pytest.param(job(), [pod("Running", state={"terminated": {"exitCode": 7}})], Phase.RUNNING,
                     "a-0 ended with exit status 7", id="a-pod-has-failed"),
        pytest.param(job(), [pod("Succeeded")], Phase.RUNNING, "its pods have ended", id="ending"),
        pytest.param(job(), [pod("Failed", state={"terminated": {"exitCode": 75}})], Phase.QUEUED,
                     "its pods have ended; a-0 ended with exit status 75", id="between-two-starts"),
        pytest.param(job(), [pod("Failed"), pod("Pending", [UNSCHEDULABLE], name="a-1")],
                     Phase.QUEUED, f"Unschedulable: {UNSCHEDULABLE['message']}",
                     id="next-start-has-no-room"),
        pytest.param(job(), [pod("Running"), pod("Pending", [UNSCHEDULABLE], name="a-1")],
                     Phase.RUNNING, f"Unschedulable: {UNSCHEDULABLE['message']}",
                     id="replacement-has-no-room"),
        pytest.param(job({"type": "Suspended", "status": "True"}), [pod("Failed")], Phase.QUEUED,
                     "it is suspended, as by a queue", id="suspended-after-a-start"),
        pytest.param(job(deletionTimestamp="now"), [pod("Running")], Phase.RUNNING,
                     "it is being deleted", id="being-deleted"),
        pytest.param(job({"type": "Complete", "status": "True"}), [], Phase.SUCCEEDED, "",
                     id="complete"),
        pytest.param(job({"type": "Failed", "status": "False"}), [], Phase.QUEUED,
                     "no pod has been made yet", id="condition-that-is-false"),
        pytest.param(
            job({"type": "Failed", "status": "True", "reason": "DeadlineExceeded",
                 "message": "Job was active longer than specified deadline"}),
            [pod("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})],
            Phase.FAILED,
            "DeadlineExceeded: Job was active longer than specified deadline; "
            "a-0 ended with exit status 137 (OOMKilled)",
            id="failed",
        ),
    ],
)  # fmt: skip
def test_what_the_server_says(
    job_text: str, pods: list[dict[str, Any]], phase: Phase, why: str
) -> None:
    said = read_objects(job_text, json.dumps({"items": pods}), "1")

    assert said == JobStatus(phase=phase, why=why, place=said.place)
    assert said.place == ("n1" if pods and "nodeName" in pods[0]["spec"] else "")


AT = datetime(2026, 11, 28, 11, 15, 2, tzinfo=UTC).timestamp()
"""When the pods below ended or were to be gone, in unix seconds."""


def indexed(
    index: int, number: int, phase: str, *, of_index: int | None = None, **metadata: Any
) -> dict[str, Any]:
    """Return a pod of an index, which is the run's pod of that number; it is on that node."""
    ended = {"terminated": {"exitCode": 143, "finishedAt": _TIME}} if phase == "Failed" else None
    found = pod(phase, state=ended, node=f"n{index}", name=f"a-{index}-{number}")
    notes = {"batch.kubernetes.io/job-completion-index": str(index)}
    if of_index is not None:
        notes["batch.kubernetes.io/job-index-failure-count"] = str(of_index)
    created = f"2026-11-28T11:14:{number:02}Z"
    found["metadata"] |= {"annotations": notes, "creationTimestamp": created, **metadata}
    return found


def test_the_newest_pod_of_each_index_counts_and_comes_first() -> None:
    starts = [indexed(index, 2 * start + index, "Failed") for start in range(3) for index in (0, 1)]
    running = [indexed(0, 8, "Running"), indexed(1, 9, "Failed"), *starts]

    def said(pods: list[dict[str, Any]], *conditions: Mapping[str, str]) -> str:
        found = read_objects(job(*conditions), json.dumps({"items": pods}), "1")
        assert found.place == "n0,n1"
        return found.why

    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    last = "a-1-5 ended with exit status 143; a-0-4 ended with exit status 143"
    assert said(starts) == f"its pods have ended; {last}"
    assert said(starts, failed) == f"BackoffLimitExceeded; {last}"
    assert said(running) == "a-1-9 ended with exit status 143"


@pytest.mark.parametrize(
    ("of_index", "ignored", "after_s", "due"),
    [
        (0, 0, 3.0, "in 7.0 s"),
        (1, 0, 3.0, "in 17 s"),
        (1, 1, 3.0, "in 37 s"),
        (5, 0, 0.0, "in 5 min 20 s"),
        (6, 0, 0.0, "in 10 min 00 s"),
        (5000, 0, 0.0, "in 10 min 00 s"),
        (0, 0, 11.0, "now"),
        (None, 0, 3.0, None),
    ],
)
def test_the_next_pod_of_an_index_is_due_when_kubernetes_makes_it(
    of_index: int | None, ignored: int, after_s: float, due: str | None
) -> None:
    failed = indexed(1, 1, "Failed", of_index=of_index)
    failed["metadata"]["annotations"]["batch.kubernetes.io/job-index-ignored-failure-count"] = str(
        ignored
    )
    # A sidecar's end delays no pod, and of an index that has succeeded no other one comes.
    later = {"exitCode": 0, "finishedAt": "2026-11-28T11:15:09Z"}
    failed["status"]["initContainerStatuses"] = [{"name": "s", "state": {"terminated": later}}]
    done = indexed(0, 0, "Succeeded", of_index=0)
    pods = json.dumps({"items": [done, failed]})

    said = read_objects(job(), pods, "1", now=AT + after_s)

    told = f"; the next pod of index 1 is due {due}" if due else ""
    assert said.why == f"its pods have ended; a-1-1 ended with exit status 143{told}"
    assert said.phase is Phase.QUEUED


TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.mark.parametrize(
    ("phase", "condition", "lost", "after_s", "is_dead"),
    [
        pytest.param("Running", TAINTED, (), 61.0, True, id="tainted"),
        pytest.param("Running", EVICTED, (), 61.0, False, id="evicted"),
        pytest.param("Running", EVICTED, ("n1",), 61.0, True, id="evicted-of-a-lost-node"),
        pytest.param("Running", None, ("n1",), 61.0, True, id="deleted-of-a-lost-node"),
        pytest.param("Pending", None, ("n1",), 61.0, True, id="never-started-on-a-lost-node"),
        pytest.param("Running", None, ("n2",), 61.0, False, id="another-node-is-lost"),
        pytest.param("Running", TAINTED, ("n1",), 59.0, False, id="may-still-end"),
        pytest.param("Running", TAINTED, ("n1",), None, False, id="nobody-deletes-it"),
        pytest.param("Failed", TAINTED, ("n1",), 61.0, False, id="has-ended"),
    ],
)
def test_a_pod_that_stays_on_a_node_that_does_not_answer_is_told(
    phase: str,
    condition: Mapping[str, str] | None,
    lost: Sequence[str],
    after_s: float | None,
    is_dead: bool,
) -> None:
    going = {"deletionTimestamp": _TIME} if after_s is not None else {}
    stuck = indexed(1, 1, phase, **going)
    stuck["status"]["conditions"] = [condition] if condition else []
    now = AT + (after_s or 0.0)

    def said(job_text: str, *others: Mapping[str, Any]) -> JobStatus:
        pods = json.dumps({"items": [stuck, *others]})
        return read_objects(job_text, pods, "1", lost_nodes=lost, now=now)

    beside = said(job(), indexed(0, 0, "Running"))
    alone = said(job(), indexed(0, 0, "Failed"))
    deleted = said(job(deletionTimestamp="now"))

    text = (
        "a-1-1 is not replaced, since its node n1 does not answer: when that machine is off, and "
        f"only then, kubectl taint nodes n1 {OUT_OF_SERVICE}"
    )
    assert [text in each.why for each in (beside, alone, deleted)] == [is_dead] * 3
    assert beside.phase is Phase.RUNNING
    is_idle = is_dead or phase != "Running"
    assert alone.phase is (Phase.QUEUED if is_idle else Phase.RUNNING)


def test_nodes_are_asked_for_only_where_a_pod_is_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person may not be allowed to look at nodes: then nothing is known of them."""
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"job_id": "jobs.batch/a"})
    asked = []
    answers: dict[str, str | None] = {"node/n1": "Unknown"}
    pods = [indexed(0, 0, "Running"), indexed(1, 1, "Running")]

    def ask(self: Kubectl, *words: str) -> str:
        asked.append(words)
        if "pods" in words:
            return json.dumps({"items": pods})
        if words[1] in answers and answers[words[1]] is None:
            raise OutsideError('nodes "n1" is forbidden')
        return answers.get(words[1]) or job()

    monkeypatch.setattr(Kubectl, "ask", ask)
    assert KubernetesRuns().status(run).why == ""
    assert len(asked) == 2
    pods[1]["metadata"]["deletionTimestamp"] = _TIME
    assert OUT_OF_SERVICE in KubernetesRuns().status(run).why
    assert [words[1] for words in asked[4:]] == ["node/n1"]
    for answer in ("True", None):
        answers["node/n1"] = answer
        assert KubernetesRuns().status(run) == JobStatus(phase=Phase.RUNNING, place="n0,n1")


def test_the_page_says_what_status_says_of_a_node_that_does_not_answer() -> None:
    page = (Path(__file__).parents[4] / "docs/clusters.md").read_text()

    assert f"kubectl taint nodes NODE {OUT_OF_SERVICE}" in page
    assert re.search(r"only when (that|the) machine is off", page)


def test_run_goes_on_while_further_nodes_do_that_its_job_has_not_ended() -> None:
    failed = job({"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"})
    further = pod("Running", node="n1")
    further["metadata"]["name"] = "a-g1-0"
    further["metadata"]["labels"] = {"training-recipes/node": "1"}
    pods = [pod("Failed"), further]

    said = read_objects(failed, json.dumps({"items": pods}), "1")
    further["status"]["phase"] = "Succeeded"
    later = read_objects(failed, json.dumps({"items": pods}), "1")

    why = "its Job has failed, and 1 further nodes go on without it: BackoffLimitExceeded"
    assert said == JobStatus(phase=Phase.RUNNING, why=why, place="n1")
    assert later.phase is Phase.FAILED


def test_a_job_of_hyperpods_operator_keeps_the_size_that_this_gives_it(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path, job=k8s_job("hyperpod"))

    with pytest.raises(RecipeError, match="whose operator decides about its size; allowed: "):
        KubernetesRuns().scale(run, 2)

    assert list(tmp_path.iterdir()) == []


NOW = "2026-11-24T10:01:00Z"


def waiting(
    *reasons: str | None,
    name: str = "a-0",
    at: str = "2026-11-24T10:00:00Z",
    phase: str = "Pending",
) -> dict[str, Any]:
    """Return a pod whose containers wait, or run where no reason is given."""
    states = [{"waiting": {"reason": each}} if each else {"running": {}} for each in reasons]
    metadata = {"name": name, "uid": f"uid-{name}", "creationTimestamp": at}
    claim = {"name": "v", "persistentVolumeClaim": {"claimName": "results"}}
    status = {"phase": phase, "containerStatuses": [{"state": each} for each in states]}
    return {"metadata": metadata, "spec": {"volumes": [claim]}, "status": status}


def warning(reason: str, message: str, name: str = "a-0", kind: str = "Pod", s: int = 1) -> Any:
    about = {"kind": kind, "name": name, "uid": f"uid-{name}"}
    at = f"2026-11-24T10:00:{s:02}Z"
    return {"involvedObject": about, "reason": reason, "message": message, "lastTimestamp": at}


@pytest.mark.parametrize(
    ("pod", "is_long"),
    [
        pytest.param(waiting("ContainerCreating"), True, id="creating"),
        pytest.param(waiting("PodInitializing", "PodInitializing"), True, id="initializing"),
        pytest.param(waiting(), True, id="unscheduled"),
        pytest.param(waiting("ContainerCreating", at=NOW), False, id="a-moment"),
        pytest.param(waiting(None, "PodInitializing"), False, id="its-sidecar-runs"),
        pytest.param(waiting("ImagePullBackOff"), False, id="has-words-of-its-own"),
        pytest.param(waiting(None, phase="Running"), False, id="running"),
    ],
)
def test_pods_that_wait_for_long_are_told_from_others(pod: Any, is_long: bool) -> None:
    assert pods_that_wait(json.dumps({"items": [pod]}), unix_s(NOW)) == [pod] * is_long


MOUNT = 'MountVolume.SetUp failed for volume "v" : mount failed: exit status 32'
NO_CLASS = 'storageclass.storage.k8s.io "nosuch" not found'


@pytest.mark.parametrize(
    ("events", "words"),
    [
        pytest.param([warning("FailedMount", MOUNT)], f"of a-0: FailedMount: {MOUNT}", id="mount"),
        pytest.param([warning("FailedAttachVolume", "Multi-Attach error", s=9),
                      warning("FailedMount", MOUNT, s=3)],
                     "of a-0: FailedAttachVolume: Multi-Attach error", id="newest"),
        pytest.param([warning("FailedCreatePodSandBox", "no IP left", "a-1")],
                     "of a-1: FailedCreatePodSandBox: no IP left", id="sandbox-of-another-pod"),
        pytest.param([warning("ProvisioningFailed", NO_CLASS, "results", "PersistentVolumeClaim")],
                     f"of results: ProvisioningFailed: {NO_CLASS}", id="claim"),
        pytest.param([warning("FailedScheduling", "0/4 nodes")], "", id="said-by-the-pod"),
        pytest.param([warning("FailedMount", MOUNT, "b-0")], "", id="of-another-run"),
        pytest.param([warning("ProvisioningFailed", NO_CLASS, "b", "PersistentVolumeClaim")], "",
                     id="another-claim"),
        pytest.param([], "", id="none"),
    ],
)  # fmt: skip
def test_warnings_of_a_cluster_about_pods_that_do_not_begin(events: list[Any], words: str) -> None:
    pods = [waiting("ContainerCreating"), waiting("ContainerCreating", name="a-1")]

    text = warning_words(pods, events)

    assert text == (f"2 pods do not begin, {words}" if words else "")


STATUS = """#!/bin/sh
case "$*" in
  *"get events"*) cat events ;;
  *"get pods"*) cat pods ;;
  *"get "*) printf '%s' '{"kind": "Job", "metadata": {"uid": "1"}}' ;;
esac
"""


def test_status_says_what_a_pod_that_cannot_mount_a_volume_waits_for(
    tmp_path: Path, kubectl: Callable[[str], None]
) -> None:
    kubectl(STATUS)
    (tmp_path / "pods").write_text(json.dumps({"items": [waiting("ContainerCreating")]}))
    (tmp_path / "events").write_text(json.dumps({"items": [warning("FailedMount", MOUNT)]}))
    submitted = {"job_id": "jobs.batch/a", "uid": "1"}
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted=submitted)

    said = KubernetesRuns().status(run)
    kubectl(STATUS.replace("cat events", "exit 1"))
    without = KubernetesRuns().status(run)

    assert said.phase is without.phase is Phase.QUEUED
    assert said.why == f"ContainerCreating; 1 pods do not begin, of a-0: FailedMount: {MOUNT}"
    assert without.why == "ContainerCreating", "not everybody may read events"


@pytest.mark.parametrize("of", ["a", "a-node-0"])
def test_status_says_why_no_pod_is_made(of: str) -> None:
    made = job(name="a", creationTimestamp="2026-11-24T10:00:02Z")
    refused = warning("FailedCreate", "violates PodSecurity", of, "Job", s=9)
    before = warning("FailedCreate", "quota", of, "Job", s=5)
    others = warning("FailedCreate", "x", "b", "Job", s=10), warning("Other", "x", of, "Job", s=11)
    earlier = warning("FailedCreate", "of an earlier job", of, "Job", s=1)

    told, old = (read_objects(made, "", "1", warned=[*others, each]) for each in (refused, earlier))

    assert told.why == "no pod has been made yet; FailedCreate: violates PodSecurity"
    assert old.why == "no pod has been made yet"
    assert read_objects(made, "", "1", warned=[refused, before]).why == told.why
    one = json.dumps({"items": [pod("Running")]})
    some = read_objects(made, one, "1", warned=[refused, before], num_pods=2)
    assert some.why == "1 of 2 pods are made; FailedCreate: violates PodSecurity"
    assert read_objects(made, one, "1", warned=[refused, before]).why == ""


EXEC = """#!/bin/sh
case "$*" in
  *"get pods"*phase=Running*) cat pods ;;
  *"exec pod/a-0 --container=node -- sh -c "*)
    while [ "$1" != -- ]; do shift; done
    script=$4; shift 5
    [ ! -f meanwhile ] || cp there/events-b.jsonl events.copy-b.jsonl
    exec sh -c "$script" there "$@" ;;
esac
"""


def test_events_that_are_new_are_fetched_from_a_pod(
    tmp_path: Path, kubectl: Callable[[str], None]
) -> None:
    kubectl(EXEC)
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"job_id": "jobs.batch/a"})
    pods, there = tmp_path / "pods", tmp_path / "there"
    pods.write_text("")
    there.mkdir()

    def copied(**lines: str) -> list[str]:
        """Return the lines of each copy after some were written to the pods' files."""
        for name, text in lines.items():
            with (there / f"events{name.replace('_', '-')}.jsonl").open("a") as file:
                file.write(text)
        return [each.read_text() for each in event_files(KubernetesRuns().events(run))]

    assert copied() == []
    pods.write_text("pod/a-0\n")
    assert copied(_a='{"event": 1}\n{"event": 2', _b='{"even') == ['{"event": 1}\n']
    (there / "events-d.jsonl").mkdir()
    assert copied(_a="}\n", _b='t": 3}\n') == ['{"event": 1}\n{"event": 2}\n', '{"event": 3}\n']
    assert copied(**{"": '{"event": 4}\n'})[0] == '{"event": 4}\n'
    (tmp_path / "meanwhile").touch()
    assert copied(_b='{"event": 5}\n')[2] == '{"event": 3}\n{"event": 5}\n', "copied twice"
    pods.write_text("")
    assert len(copied(_a='{"event": 6}\n')) == 3
    assert not list(tmp_path.glob("events*6*"))


@pytest.mark.parametrize(
    ("phase", "event", "is_told"),
    [
        (Phase.RUNNING, "checkpoint_saved", False),
        (Phase.SUCCEEDED, "checkpoint_saved", True),
        (Phase.FAILED, "checkpoint_saved", True),
        (Phase.SUCCEEDED, "worker_finished", False),
        (Phase.UNREACHABLE, "checkpoint_saved", False),
    ],
)
def test_status_says_that_no_pod_has_handed_over_how_the_run_went_on(
    tmp_path: Path, kubectl: Callable[[str], None], phase: Phase, event: str, is_told: bool
) -> None:
    kubectl(EXEC.replace("case", "touch asked\ncase", 1))
    (tmp_path / "pods").write_text("")
    job = k8s_job("job", {"trainer.num_nodes": 1, "trainer.num_devices": 1})
    run = RunFolder(path=tmp_path, job=job, submitted={"job_id": "jobs.batch/a"})
    copy = tmp_path / "events.copy-a-0.jsonl"
    with EventLog(copy, node="a-0", rank=0, generation=0) as events:
        events.write("checkpoint_saved", step=1)
        events.write("step", step=4)
        events.write(event, step=1)

    lines = status_lines(sight_of(run, KubernetesRuns(), JobStatus(phase=phase)))

    told = "left out: later events, since no pod runs that has them"
    assert any(told in line for line in lines) == is_told
    assert any("checkpoint of step 1 when it was last seen" in line for line in lines) == is_told
    assert any("checkpoint of step 1" in line for line in lines)
    # A later one may have been saved as the run ended.
    assert not (is_told and any("is in no checkpoint" in line for line in lines))
    assert (tmp_path / "asked").exists() == (phase is not Phase.UNREACHABLE)

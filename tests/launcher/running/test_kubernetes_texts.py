"""What kubectl prints, and what is read from it. The objects are cut down to what is looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.kubernetes import KubernetesRuns, new_lines, read_objects
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.standing import JobStatus, Phase
from resilience.event_files import event_files
from tests.launcher.k8s_job import k8s_job

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
}
PULL = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:1"'}


def job(*conditions: Mapping[str, str], **metadata: str) -> str:
    status = {"conditions": list(conditions)}
    return json.dumps({"kind": "Job", "metadata": {"uid": "1", **metadata}, "status": status})


def pod(
    phase: str,
    conditions: Sequence[Mapping[str, str]] = (),
    state: Mapping[str, Any] | None = None,
    node: str = "",
) -> dict[str, Any]:
    containers = [{"name": "node", "state": state}] if state else []
    status = {"phase": phase, "conditions": list(conditions), "containerStatuses": containers}
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": "a-0"}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("job_text", "pods", "phase", "why"),
    [
        pytest.param("", [], Phase.FORGOTTEN, "the cluster has no such job any more", id="gone"),
        pytest.param(job(uid="2"), [], Phase.FORGOTTEN,
                     "the cluster has a job of this name that was created later", id="another"),
        pytest.param(job(), [], Phase.QUEUED, "no pod has been made yet", id="no-pods"),
        pytest.param(job({"type": "Suspended", "status": "True"}), [], Phase.QUEUED,
                     "it is suspended, as by a queue", id="suspended"),
        pytest.param(job(), [pod("Pending", [UNSCHEDULABLE])], Phase.QUEUED,
                     f"Unschedulable: {UNSCHEDULABLE['message']}", id="no-room"),
        pytest.param(job(), [pod("Pending", state={"waiting": PULL})], Phase.QUEUED,
                     f"ImagePullBackOff: {PULL['message']}", id="no-image"),
        pytest.param(job(), [pod("Running", node="n1"), pod("Pending")], Phase.RUNNING, "",
                     id="running"),
        pytest.param(job(), [pod("Running", state={"terminated": {"exitCode": 7}})], Phase.RUNNING,
                     "a-0 ended with exit status 7", id="a-pod-has-failed"),
        pytest.param(job(), [pod("Succeeded")], Phase.RUNNING, "its pods have ended", id="ending"),
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


def test_run_goes_on_while_further_nodes_do_that_its_job_has_not_ended() -> None:
    failed = job({"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"})
    further = pod("Running", node="n1")
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


def test_a_run_whose_job_is_anothers_by_now_is_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"metadata": {"uid": "2"}}
    monkeypatch.setattr(KubernetesRuns, "ask", lambda *words: json.dumps(found))
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"uid": "1"})

    with pytest.raises(OutsideError, match="is another run's, which was created later"):
        KubernetesRuns().scale(run, 2)

    assert list(tmp_path.iterdir()) == []


def test_what_is_no_answer_is_said() -> None:
    with pytest.raises(OutsideError, match="kubectl printed no JSON but 'nonsense'"):
        read_objects("nonsense", "", "1")


def test_lines_that_kubectl_prints_again_are_left_out() -> None:
    assert new_lines("1 a\n1 b\n2 c\n", None) == ["1 a", "1 b", "2 c"]
    assert new_lines("1 a\n1 b\n2 c\n", "1 b") == ["2 c"]
    assert new_lines("3 d\n", "1 b") == ["3 d"]


KUBECTL = """#!/bin/sh
case "$*" in
  *"get pods"*) printf 'pod/a-0\\npod/a-1\\n' ;;
  *"logs pod/a-0"*--since-time=*)
    printf '2026-11-24T10:00:03.5Z three\\n2026-11-24T10:00:04Z four\\n' ;;
  *"logs pod/a-0"*) printf '2026-11-24T10:00:01Z one\\n2026-11-24T10:00:03.5Z three\\n' ;;
  *"logs pod/a-1"*--since-time=*) ;;
  *"logs pod/a-1"*) printf '2026-11-24T10:00:02Z two\\n' ;;
esac
"""


EXEC = """#!/bin/sh
case "$*" in
  *"get pods"*phase=Running*) cat pods ;;
  *"exec pod/a-0 --container=node -- sh -c "*)
    while [ "$1" != -- ]; do shift; done
    script=$4; shift 5
    exec sh -c "$script" there "$@" ;;
esac
"""


def test_events_that_are_new_are_fetched_from_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(EXEC)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
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
    pods.write_text("")
    assert len(copied(_a='{"event": 5}\n')) == 3
    assert not list(tmp_path.glob("events*5*"))


def test_lines_of_pods_are_merged_by_the_times_of_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"job_id": "jobs.batch/a"})
    tail = KubernetesRuns().logs(run, None)

    first = [(line.source, line.text) for line in tail.read_new()]
    second = [(line.source, line.text) for line in tail.read_new()]

    assert first == [("a-0", "one"), ("a-1", "two"), ("a-0", "three")]
    assert second == [("a-0", "four")]

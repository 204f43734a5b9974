"""Lines of pods, and what goes on while a cluster or one of its nodes gives no answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.kubernetes import KubernetesRuns, new_lines
from launcher.clusters.running.local import LocalMachine
from launcher.clusters.running.pods import read_objects
from launcher.commands import cancel, logs
from launcher.errors import OutsideError
from launcher.monitor.standing import JobStatus, Phase
from resilience.arguments import NO_NAME
from tests.launcher.commands.test_status import Happened, lines_of, opened, state_of
from tests.launcher.k8s_job import k8s_job

KUBECTL = """#!/bin/sh
case "$*" in
  *"get pods"*)
    n=$(cat away || echo 0)
    [ "$n" -eq 0 ] || { echo $((n - 1)) > away; echo refused >&2; exit 1; }
    printf 'pod/a-0\\npod/a-1\\n' ;;
  *"logs pod/a-0"*--since-time=2026-11-24T10:00:03.5Z*)
    printf '2026-11-24T10:00:03.5Z three\\n2026-11-24T10:00:04Z four\\n' ;;
  *"logs pod/a-0"*--since-time=2026-11-24T10:00:04Z*) cat words || : ;;
  *"logs pod/a-0"*)
    printf '2026-11-24T10:00:01Z one\\n2026-11-24T10:00:03Z 1%%\\r2%%\\n'
    printf '2026-11-24T10:00:03.5Z three\\n' ;;
  *"logs pod/a-1"*--since-time=*) [ ! -e dead ] || { echo "dial: refused" >&2; exit 1; } ;;
  *"logs pod/a-1"*) printf '2026-11-24T10:00:02Z two\\n2026-11-24T10:00:02Z  in\\n' ;;
esac
"""


def test_lines_that_kubectl_prints_again_are_left_out() -> None:
    assert new_lines(["1 a", "1 b", "2 c"], "") == ["1 a", "1 b", "2 c"]
    assert new_lines(["1 a", "1 b", "2 c"], "1 b") == ["2 c"]
    assert new_lines(["1 a", "1 b", "2 c"], "2 c") == []
    assert new_lines(["3 d"], "1 b") == ["3 d"]


@pytest.fixture
def read(tmp_path: Path, kubectl: Callable[[str], None]) -> Callable[[], list[tuple[str, str]]]:
    """Reads what is new of the pods' lines: from which pod, and the text."""
    kubectl(KUBECTL)
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"job_id": "jobs.batch/a"})
    tail = KubernetesRuns().logs(run, None)
    return lambda: [(line.source, line.text) for line in tail.read_new()]


WAITS = """#!/bin/sh
case "$*" in
  *"get pods"*) printf 'pod/a-0\\npod/a-1\\n' ;;
  *a-0*=memoryd*) echo '2026-11-24T10:00:01Z memoryd: no room in /dev/shm' ;;
  *=node*) echo 'container "node" in pod "a" is waiting to start: PodInitializing' >&2; exit 1 ;;
  *) echo 'error: container memoryd is not valid for pod a-1' >&2; exit 1 ;;
esac
"""


def test_a_daemon_that_keeps_the_workers_waiting_is_heard(
    read: Callable[[], list[tuple[str, str]]], kubectl: Callable[[str], None]
) -> None:
    kubectl(WAITS)

    assert read() == [("a-0", "memoryd: no room in /dev/shm")]
    assert read() == []


NO_PODS = """#!/bin/sh
case "$*" in
  *"get pods"*"=name"*) ;;
  *"get pods"*) echo '{"items": []}' ;;
  *"get jobs.batch/a"*) echo '{"kind": "Job", "metadata": {"uid": "1"}}' ;;
esac
"""


def test_logs_without_a_line_say_how_the_run_stands(
    tmp_path: Path,
    kubectl: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubectl(NO_PODS)
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"job_id": "jobs.batch/a"})
    monkeypatch.setattr(logs, "find_run", lambda *words: run)

    assert logs.print_logs([run.job.name], tmp_path) == 0

    words = f"{run.job.name} has no lines to show; it is queued: no pod has been made yet\n"
    assert capsys.readouterr() == ("", words)


BEGIN = [("a-0", "one"), ("a-1", "two"), ("a-1", " in"), ("a-0", r"1%\r2%"), ("a-0", "three")]


def test_lines_of_pods_are_merged_by_the_times_of_their_nodes(
    read: Callable[[], list[tuple[str, str]]],
) -> None:
    assert read() == BEGIN
    assert read() == [("a-0", "four")]


def test_words_of_kubectl_about_a_pod_that_is_gone_stay_whole_and_are_said_once(
    read: Callable[[], list[tuple[str, str]]], tmp_path: Path
) -> None:
    """They have no time, of which the first word would be taken for one."""
    assert [read(), read()] == [BEGIN, [("a-0", "four")]]
    words = "unable to retrieve container logs for containerd://1f"

    (tmp_path / "words").write_text(words)
    assert [read(), read()] == [[("a-0", words)], []]
    (tmp_path / "words").write_text("2026-11-24T10:00:04Z four\n2026-11-24T10:00:05Z five\n")
    assert read() == [("a-0", "five")]


def test_lines_of_others_come_while_a_pods_node_is_dead(
    read: Callable[[], list[tuple[str, str]]], tmp_path: Path
) -> None:
    assert read() == BEGIN

    (tmp_path / "dead").touch()

    assert sorted(read()) == [("a-0", "four"), ("a-1", "no lines for now: dial: refused")]
    assert read() == []


def test_follower_goes_on_after_an_outage_of_the_cluster_with_no_line_lost_or_doubled(
    read: Callable[[], list[tuple[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logs, "_FAR_PAUSE_S", 0.0)
    assert read() == BEGIN
    (tmp_path / "away").write_text("3")

    class Tail:
        read_new = staticmethod(read)

    assert logs.await_lines(Tail()) == [("a-0", "four")]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "no lines for now, asking again for 10 min 00 s",
    ]  # fmt: skip
    assert logs.await_lines(Tail()) == []
    (tmp_path / "away").write_text("3")
    monkeypatch.setattr(logs, "OUTAGE_S", 0.0)
    with pytest.raises(OutsideError, match="so they are no longer followed; the run may go on"):
        logs.await_lines(Tail())


def test_cancel_waits_for_the_end_through_an_outage_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer is no end: `cancel` said at once that the run had not ended."""
    monkeypatch.setattr(cancel, "_PAUSE_MIN_S", 0.0)
    phases = iter([Phase.RUNNING, Phase.UNREACHABLE, Phase.RUNNING])

    class Cluster(LocalMachine):
        def status(self, run: RunFolder) -> JobStatus:
            return JobStatus(phase=next(phases, Phase.CANCELLED))

    run = RunFolder(path=tmp_path, job=k8s_job("job"))

    assert cancel.wait_for_end(run, Cluster(), 60.0).standing.phase is Phase.CANCELLED


def test_status_says_what_a_run_was_warned_of_until_its_next_generation() -> None:
    """As that the name of a node does not resolve."""

    job = k8s_job("job")
    texts = [f"{each}: {NO_NAME}" for each in ("a-1.a:29500", "memoryd cannot reach a-1.a:29501")]
    warned: Happened = ("n0", None, "warning", {"text": texts[0]})
    other: Happened = ("n0", 0, "warning", {"text": texts[1]})

    def row(*happened: Happened, phase: Phase = Phase.RUNNING) -> list[str]:
        lines = lines_of(state_of(job, *happened), job, phase=phase, after_s=70)
        return [line[12:] for line in lines if line.startswith("  warned ")]

    ago = "(1 min 10 s ago)"
    told = f"{texts[0]} {ago}; {texts[1]} {ago}"
    assert row(warned, other, warned) == [told]
    assert row(warned, other, opened(4, 2)) == row(warned, phase=Phase.FAILED) == []


def test_a_run_whose_job_is_anothers_by_now_is_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"metadata": {"uid": "2"}}
    monkeypatch.setattr(Kubectl, "ask", lambda *words: json.dumps(found))
    run = RunFolder(path=tmp_path, job=k8s_job("job"), submitted={"uid": "1"})

    with pytest.raises(OutsideError, match="is another run's, which was created later"):
        KubernetesRuns().scale(run, 2)

    assert list(tmp_path.iterdir()) == []


def test_what_is_no_answer_is_said() -> None:
    with pytest.raises(OutsideError, match="kubectl printed no JSON but 'nonsense'"):
        read_objects("nonsense", "", "1")

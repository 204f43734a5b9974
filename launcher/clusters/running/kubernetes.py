"""Runs on a Kubernetes cluster, by kubectl: an Indexed Job, or HyperPod's own kind.

An elastic run has a Job for each further node beside it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.clusters.k8s.growth import (
    NODE_LABEL,
    growth_range,
    plan_growth_jobs,
    read_growth_jobs,
    time_left_s,
)
from launcher.clusters.k8s.start import run_path
from launcher.clusters.k8s.submit import create_growth, kubectl_command, submit_k8s
from launcher.clusters.k8s.values import JOB_LABEL
from launcher.clusters.running.cluster import (
    ASK_TIMEOUT_S,
    Cleaned,
    LogLine,
    LogTail,
    RunFolder,
    is_alive,
)
from launcher.clusters.running.lines import merge_lines, timed_lines
from launcher.clusters.running.pods import overdue_nodes, read_json, read_objects
from launcher.clusters.running.requests import forget_size, write_size
from launcher.clusters.submission import Submission, run_program
from launcher.clusters.token import token_secret_name
from launcher.errors import OutsideError, RecipeError
from launcher.job.cluster import K8sCluster
from launcher.job.cluster_rules import growth_name
from launcher.monitor.logs import plain
from launcher.monitor.standing import JobStatus, Phase
from launcher.rundir import EVENTS_FILE
from resilience.event_files import event_files
from resilience.plain_files import open_plain

_LINES_MAX = 10_000
"""Of a pod at a time: a run's whole output may be more than kubectl gets in its time."""

_EVENTS_COPY = "events.copy.jsonl"
_FILE_LINE = re.compile(r"^==> events((?:-[^/\n]+)?\.jsonl)\n", re.MULTILINE)
"""Names the file of the lines behind it; no event begins so."""
_TELL_NEW = """cd -- "$0" || exit
for file in events.jsonl events-*.jsonl; do
  [ -f "$file" ] || continue
  begin=1
  for known; do case $known in "$file="*) begin=${known##*=} ;; esac; done
  echo "==> $file"
  tail -c "+$begin" -- "$file"
  echo
done"""
"""Prints each file of the log in a folder from the given byte on, and closes its last line."""
_GONE_S = 90.0
"""How long objects may take to go: pods have their grace period."""
_PAUSE_S = 0.5
_READY = """--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}"""


class KubernetesRuns:
    """The cluster that kubectl points at."""

    def submit(self, run: RunFolder) -> Submission:
        """Create what the run's manifest holds. Raises OutsideError with kubectl's words."""
        forget_size(run.path)
        return submit_k8s(run.path, run.job)

    def status(self, run: RunFolder) -> JobStatus:
        """Return what the API server says of the job and its pods."""
        if not run.job_id:
            return JobStatus(phase=Phase.FORGOTTEN, why="it was not submitted")
        try:
            job = self.ask(run, "get", run.job_id, "--ignore-not-found", "--output=json")
            pods = self.ask(run, "get", "pods", _selector(run), "--output=json") if job else "{}"
            uid, now = str(run.submitted.get("uid", "")), time.time()
            lost = [name for name in overdue_nodes(pods, now) if self._is_lost(run, name)]
            return read_objects(job, pods, uid, lost_nodes=lost, now=now)
        except OutsideError as error:
            return JobStatus(phase=Phase.UNREACHABLE, why=str(error))

    def _is_lost(self, run: RunFolder, node: str) -> bool:
        """Return whether a node is not Ready; False where a person may not look at nodes."""
        with suppress(OutsideError):
            return self.ask(run, "get", f"node/{node}", _READY) != "True"
        return False

    def events(self, run: RunFolder) -> Path:
        """Return the pods' log where this machine has their folder, else a copy in the run's.

        What is new is fetched from a pod that runs; without one the copy stays as it is.
        """
        cluster = run.job.cluster
        assert isinstance(cluster, K8sCluster)
        there = Path(run_path(run.job, cluster)) / EVENTS_FILE
        if found := next(filter(event_files, (run.events, there)), None):
            return found
        copy = run.path / _EVENTS_COPY
        with suppress(OutsideError, OSError):
            self._fetch(run, there, copy)
        return copy

    def _fetch(self, run: RunFolder, there: Path, copy: Path) -> None:
        running = "--field-selector=status.phase=Running"
        pods = self.ask(run, "get", "pods", _selector(run), running, "--output=name").split()
        if not pods:
            return
        begins = [
            f"{each.name.replace('.copy', '', 1)}={each.stat().st_size + 1}"
            for each in event_files(copy)
        ]
        words = ("--container=node", "--", "sh", "-c", _TELL_NEW, str(there.parent), *begins)
        _, *parts = _FILE_LINE.split(self.ask(run, "exec", pods[0], *words))
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            # Events are ASCII, and a line that is still being written is left for the next time.
            lines, _, _ = text.removesuffix("\n").rpartition("\n")
            if lines:
                path = copy.with_name(f"events.copy{name}")
                with open(path, "a", encoding="ascii", opener=open_plain) as file:
                    file.write(f"{lines}\n")

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the pods print; one rank's lines are in its node's alone."""
        if rank is not None:
            raise RecipeError(
                f"--rank {rank}: on Kubernetes a rank's own log lies in the run's folder there; "
                "allowed: logs without --rank, which has the lines of all ranks"
            )
        return PodTail(self, run)

    def cancel(self, run: RunFolder) -> None:
        """Delete the job, with which its pods end, and all else that was made for it goes.

        Raises OutsideError with kubectl's words.
        """
        if is_alive(self.status(run)):
            # In one call: nodes that are asked within two seconds stop the run, and shrink it else.
            self.delete(run, run.job_id, *self._growth_names(run))

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Create Jobs of further nodes, or delete some, whose pods then leave the run.

        Raises OutsideError with kubectl's words, also where names of nodes that are wanted again
        are not free yet; asked once more it goes on from there.
        """
        cluster = run.job.cluster
        assert isinstance(cluster, K8sCluster)
        if cluster.job_kind != "job":
            raise RecipeError(
                f"{run.job.name} is a HyperPodPyTorchJob, whose operator decides about its size; "
                "allowed: a run with cluster.job_kind 'job'"
            )
        base = read_json(self.ask(run, "get", run.job_id, "--output=json"))
        self._check_own(run, base)
        if base["metadata"].get("deletionTimestamp"):
            raise OutsideError(f"{run.job_id} is being deleted; the run keeps its size")
        write_size(run, num_nodes)
        uid, indexes = base["metadata"]["uid"], growth_range(run.job)
        found = read_json(
            self.ask(run, "get", "jobs.batch", _growth_selector(run), "--output=json")
        )
        wanted = run.job.num_nodes_at(num_nodes) - indexes.start
        plan = plan_growth_jobs(read_growth_jobs(found["items"], uid), wanted, indexes)
        if plan.delete:
            names = (growth_name(run.job.name, index) for index in plan.delete)
            self.delete(run, *(f"jobs.batch/{name}" for name in names))
        if plan.create:
            limit_s = time_left_s(base, time.time())
            create_growth(cluster, uid, plan.create, run.path, limit_s=limit_s)
        if plan.num_missing:
            raise OutsideError(
                f"{plan.num_missing} nodes of {run.job.name} that have left are still being "
                "deleted; ask once more when they are gone"
            )

    def _check_own(self, run: RunFolder, job: Mapping[str, Any]) -> None:
        """Raise OutsideError where an object of the job's name is that of a later run."""
        uid = str(run.submitted.get("uid", ""))
        if uid and job["metadata"]["uid"] != uid:
            raise OutsideError(
                f"{run.job_id} is another run's, which was created later; nothing was changed"
            )

    def _growth_names(self, run: RunFolder) -> list[str]:
        """Return the names of the Jobs that further nodes have; none for a run of one size."""
        if not growth_range(run.job):
            return []
        return self.ask(run, "get", "jobs.batch", _growth_selector(run), "--output=name").split()

    def clean(self, run: RunFolder) -> Cleaned:
        """Delete what the run's manifest and submission have made, and see it go.

        Raises OutsideError where an object of another run has the name by now.
        """
        job = self.ask(run, "get", run.job_id, "--ignore-not-found", "--output=json")
        if job:
            self._check_own(run, read_json(job))
        names = [run.job_id, *self._growth_names(run)]
        names += [f"service/{run.job.name}", f"configmap/{run.job.name}"]
        if secret := token_secret_name(run.job):
            uid = str(run.submitted.get("uid", ""))
            names += self._own_secret(run, f"secret/{secret}", uid)
        # Some go with the job before kubectl comes to them.
        found = self.ask(run, "get", *names, "--ignore-not-found", "--output=name").split()
        self.delete(run, *names)
        left = self._wait_until_gone(run, names)
        return Cleaned(
            removed=tuple(each for each in found if each not in left),
            left=tuple(f"{each}, which is still being deleted" for each in left),
        )

    def _own_secret(self, run: RunFolder, name: str, uid: str) -> list[str]:
        """Return a Secret's name if it is there and the run's: one without an owner is a user's."""
        text = self.ask(run, "get", name, "--ignore-not-found", "--output=json")
        owners = read_json(text)["metadata"].get("ownerReferences", ()) if text.strip() else ()
        return [name] if any(uid in ("", owner["uid"]) for owner in owners) else []

    def _wait_until_gone(self, run: RunFolder, names: Sequence[str]) -> list[str]:
        """Return what is still there after a while, the run's pods among it."""
        end_s = time.monotonic() + _GONE_S
        while True:
            pods = self.ask(run, "get", "pods", _selector(run), "--output=name")
            found = self.ask(run, "get", *names, "--ignore-not-found", "--output=name")
            left = [*found.split(), *pods.split()]
            if not left or time.monotonic() >= end_s:
                return left
            time.sleep(_PAUSE_S)

    def delete(self, run: RunFolder, *names: str) -> str:
        """Have objects removed once what belongs to them is; returns the names that there were."""
        words = ("--ignore-not-found", "--cascade=foreground", "--wait=false", "--output=name")
        return self.ask(run, "delete", *names, *words)

    def ask(self, run: RunFolder, *words: str) -> str:
        """Return what kubectl prints. Raises OutsideError with its words."""
        cluster = run.job.cluster
        assert isinstance(cluster, K8sCluster)
        command = (*kubectl_command(cluster), *words)
        return run_program(command, run.path, timeout_s=ASK_TIMEOUT_S)


class PodTail:
    """The lines of a run's pods, by the times that their nodes give them."""

    def __init__(self, cluster: KubernetesRuns, run: RunFolder) -> None:
        self._cluster = cluster
        self._run = run
        self._last: dict[str, str] = {}
        """The last line that was seen of each pod, with its time."""

    def read_new(self) -> Sequence[LogLine]:
        """Return the lines since the last call. Raises OutsideError where no pod answers."""
        names = self._cluster.ask(self._run, "get", "pods", _selector(self._run), "--output=name")
        found = []
        for pod in names.split():
            since = self._last.get(pod, "").partition(" ")[0]
            words = (f"--since-time={since}",) if since else (f"--tail={_LINES_MAX}",)
            try:
                text = self._cluster.ask(
                    self._run, "logs", pod, "--container=node", "--timestamps", *words
                )
            except OutsideError as error:
                if "waiting to start" in str(error) or "not have a host" in str(error):
                    continue
                raise
            lines = new_lines(text, self._last.get(pod))
            self._last[pod] = lines[-1] if lines else self._last.get(pod, "")
            shown = [plain(line) for line in lines]
            found.append(timed_lines(pod.partition("/")[2], shown, 0.0))
        return [
            LogLine(time=line.time, source=line.source, text=line.text.partition(" ")[2])
            for line in merge_lines(found)
        ]


def new_lines(text: str, last: str | None) -> list[str]:
    """Return the lines behind the last one that was seen: kubectl knows whole seconds alone."""
    lines = text.splitlines()
    if last and last in lines:
        place = len(lines) - 1 - lines[::-1].index(last)
        return lines[place + 1 :]
    return lines


def _selector(run: RunFolder) -> str:
    return f"--selector={JOB_LABEL}={run.job.name}"


def _growth_selector(run: RunFolder) -> str:
    return f"{_selector(run)},{NODE_LABEL}"

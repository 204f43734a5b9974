"""Runs on a Kubernetes cluster, by kubectl: an Indexed Job, or a kind of HyperPod's or Kubeflow's.

An elastic run has a Job for each further node beside it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.clusters.k8s import objects
from launcher.clusters.k8s.growth import (
    NODE_LABEL,
    growth_range,
    plan_growth_jobs,
    read_growth_jobs,
    time_left_s,
)
from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.k8s.objects import Found
from launcher.clusters.k8s.start import run_path
from launcher.clusters.k8s.submit import create_growth, submit_k8s, wait_for_indexed_job
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
from launcher.clusters.running.pods import overdue_nodes, pods_that_wait, read_objects
from launcher.clusters.running.requests import forget_size, write_size
from launcher.clusters.submission import Submission
from launcher.clusters.token import token_secret_name
from launcher.errors import OutsideError, RecipeError
from launcher.job.cluster_rules import growth_name, num_base_pods
from launcher.monitor.logs import plain
from launcher.monitor.standing import JobStatus, Phase
from launcher.rundir import EVENTS_FILE, SUBMITTED_FILE
from resilience.event_files import event_files
from resilience.plain_files import open_plain

_LINES_MAX = 10_000
"""Of a pod at a time: a run's whole output may be more than kubectl gets in its time."""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)(?: |$)")
"""The timestamp before each line of a container; kubectl's own words have none."""
_NO_LINES = ("waiting to start", "not have a host", "(NotFound)", "container memoryd is not valid")
"""Errors of kubectl about containers that have printed nothing yet, are gone or never were."""

EVENTS_COPY = "events.copy.jsonl"
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
_REMOVALS_MAX = 16
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
            kubectl = _kubectl(run)
            job = kubectl.ask("get", run.job_id, "--ignore-not-found", "--output=json")
            pods = kubectl.ask("get", "pods", _selector(run), "--output=json")
            uid, now = str(run.submitted.get("uid", "")), time.time()
            lost = [name for name in overdue_nodes(pods, now) if self._is_lost(run, name)]
            wanted = num_base_pods(run.job, run.job.k8s)
            lacks_pods = len(objects.read_found(pods)) < wanted
            is_asked = job and (lacks_pods or pods_that_wait(pods, now))
            warned = self._find_warnings(run) if is_asked else []
            return read_objects(
                job, pods, uid, lost_nodes=lost, warned=warned, num_pods=wanted, now=now
            )
        except OutsideError as error:
            return JobStatus(phase=Phase.UNREACHABLE, why=str(error))

    def _is_lost(self, run: RunFolder, node: str) -> bool:
        """Return whether a node is not Ready; False where a person may not look at nodes."""
        with suppress(OutsideError):
            return _kubectl(run).ask("get", f"node/{node}", _READY) != "True"
        return False

    def _find_warnings(self, run: RunFolder) -> list[dict[str, Any]]:
        """Return the warnings of the namespace; none where a person may not look at events."""
        with suppress(OutsideError):
            return _kubectl(run).find("events", "--field-selector=type=Warning")
        return []

    def events(self, run: RunFolder) -> Path:
        """Return the pods' log where this machine has their folder, else a copy in the run's.

        What is new is fetched from a pod that runs; without one the copy stays as it is.
        """
        there = Path(run_path(run.job, run.job.k8s)) / EVENTS_FILE
        if found := next(filter(event_files, (run.events, there)), None):
            return found
        copy = run.path / EVENTS_COPY
        with suppress(OutsideError, OSError):
            self._fetch(run, there, copy)
        return copy

    def _fetch(self, run: RunFolder, there: Path, copy: Path) -> None:
        running = "--field-selector=status.phase=Running"
        pods = _kubectl(run).ask("get", "pods", _selector(run), running, "--output=name").split()
        if not pods:
            return
        sizes = {
            each.name.replace(".copy", "", 1): each.stat().st_size for each in event_files(copy)
        }
        begins = [f"{name}={size + 1}" for name, size in sizes.items()]
        words = ("--container=node", "--", "sh", "-c", _TELL_NEW, str(there.parent), *begins)
        _, *parts = _FILE_LINE.split(_kubectl(run).ask("exec", pods[0], *words))
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            # Events are ASCII, and a line that is still being written is left for the next time.
            lines, _, _ = text.removesuffix("\n").rpartition("\n")
            if lines:
                path = copy.with_name(f"events.copy{name}")
                with open(path, "a", encoding="ascii", opener=open_plain) as file:
                    # Another command that copies now, or has copied, has written the same lines.
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(file.fileno()).st_size == sizes.get(f"events{name}", 0):
                        file.write(f"{lines}\n")

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the pods print; one rank's lines are in its node's alone."""
        if rank is not None:
            raise RecipeError(
                f"--rank {rank}: on Kubernetes a rank's own log lies in the run's folder there; "
                "allowed: logs without --rank, which has the lines of all ranks"
            )
        return PodTail(run)

    def cancel(self, run: RunFolder) -> None:
        """Delete the job, with which its pods end, and all else that was made for it goes.

        Raises OutsideError with kubectl's words.
        """
        if is_alive(self.status(run)):
            # At once: nodes that are asked within two seconds stop the run, and shrink it else.
            self._remove(
                run, [each for each in self._find_own(run) if each["kind"] in objects.JOBS]
            )

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Create Jobs of further nodes, or delete some, whose pods then leave the run.

        Raises OutsideError with kubectl's words, also where names of nodes that are wanted again
        are not free yet; asked once more it goes on from there.
        """
        if not run.job.k8s.has_indexed_pods:
            raise RecipeError(
                f"{run.job.name} is a HyperPodPyTorchJob, whose operator decides about its size; "
                "allowed: a run with cluster.job_kind 'job' or 'trainjob'"
            )
        (base,) = objects.read_found(_kubectl(run).ask("get", run.job_id, "--output=json"))
        self._check_own(run, base)
        if base["metadata"].get("deletionTimestamp"):
            raise OutsideError(f"{run.job_id} is being deleted; the run keeps its size")
        write_size(run, num_nodes)
        owner = wait_for_indexed_job(_kubectl(run), base)
        uid, indexes = owner["metadata"]["uid"], growth_range(run.job)
        found = self._find_growth(run)
        wanted = run.job.num_nodes_at(num_nodes) - indexes.start
        plan = plan_growth_jobs(read_growth_jobs(found, uid), wanted, indexes)
        if plan.delete:
            names = {growth_name(run.job.name, index) for index in plan.delete}
            self._remove(run, [each for each in found if each["metadata"]["name"] in names])
        if plan.create:
            limit_s = time_left_s(owner, time.time())
            create_growth(_kubectl(run), uid, plan.create, limit_s=limit_s)
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

    def _find_growth(self, run: RunFolder) -> list[dict[str, Any]]:
        """Return the Jobs that have the labels of further nodes; none for a run of one size."""
        words = ("jobs.batch", f"{_selector(run)},{NODE_LABEL}")
        return _kubectl(run).find(*words) if growth_range(run.job) else []

    def clean(self, run: RunFolder) -> Cleaned:
        """Delete what the run's manifest and submission have made, and see it go.

        An object of a needed name that is not the run's stays. Raises OutsideError where another
        run's job has the name by now.
        """
        for job in _kubectl(run).find(run.job_id):
            self._check_own(run, job)
        found = self._find_own(run)
        self._remove(run, found)
        left = self._wait_until_gone(run)
        return Cleaned(
            removed=tuple(name for each in found if (name := _name_of(each)) not in left),
            left=tuple(f"{each}, which is still being deleted" for each in left),
        )

    def _find_own(self, run: RunFolder) -> list[dict[str, Any]]:
        """Return what is there of the run, but for its pods; nothing that has its names alone."""
        uid = run.submitted.get("uid")
        if not uid:
            raise OutsideError(f"{run.path / SUBMITTED_FILE} has no uid to know {run.job_id} by")
        names = [*_kubectl(run).job_names]
        names += [f"service/{run.job.name}", f"configmap/{run.job.name}"]
        if secret := token_secret_name(run.job):
            names.append(f"secret/{secret}")
        found = [*_kubectl(run).find(*names), *self._find_growth(run)]
        own = objects.belonging(found, uid)
        return [each for each in own if not objects.is_controlled(each)]

    def _wait_until_gone(self, run: RunFolder) -> list[str]:
        """Return the run's objects, its pods among them, that are there after a while."""
        end_s = time.monotonic() + _GONE_S
        while True:
            pods = _kubectl(run).ask("get", "pods", _selector(run), "--output=name")
            left = [*map(_name_of, self._find_own(run)), *pods.split()]
            if not left or time.monotonic() >= end_s:
                return left
            time.sleep(_PAUSE_S)

    def _remove(self, run: RunFolder, found: Sequence[Found]) -> None:
        """Have objects removed, all at once; one that takes the name of one meanwhile stays."""
        with ThreadPoolExecutor(_REMOVALS_MAX) as pool:
            list(pool.map(_kubectl(run).remove, found))


class PodTail:
    """The lines of a run's pods, by the times that their nodes give them."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._last: dict[str, str] = {}
        """The last line that was seen of each pod, with its time."""
        self._words: dict[str, list[str]] = {}
        """By pod: kubectl's own words, which came in the place of lines."""

    def read_new(self) -> Sequence[LogLine]:
        """Return the lines since the last call, and once why a pod has none.

        Raises OutsideError where no pod answers. No line has been read then.
        """
        kubectl, found, failures = _kubectl(self._run), [], []
        pods = kubectl.ask("get", "pods", _selector(self._run), "--output=name").split()
        for pod in pods:
            last = self._last.get(pod, "")
            words = (f"--since-time={last.split()[0]}",) if last else (f"--tail={_LINES_MAX}",)
            try:
                text = _ask_lines(kubectl, pod, *words)
            except OutsideError as error:
                failures.append(error)
                text = f"no lines for now: {str(error).splitlines()[-1]}"
            lines = [line for line in text.split("\n") if line]
            new = new_lines([line for line in lines if _STAMP.match(line)], last)
            own = [line for line in lines if not _STAMP.match(line)]
            shown = [*new, *(own if own != self._words.get(pod) else ())]
            self._last[pod], self._words[pod] = (new or [last])[-1], own
            found.append(timed_lines(pod.partition("/")[2], map(plain, shown), 0.0))
        if failures and len(failures) == len(pods):
            self._words.clear()
            raise failures[-1]
        return [replace(line, text=_STAMP.sub("", line.text)) for line in merge_lines(found)]


def _ask_lines(kubectl: Kubectl, pod: str, *words: str) -> str:
    """Return what the workers' container has printed, or while it waits the daemon before it."""
    for container in ("node", "memoryd"):
        try:
            return kubectl.ask("logs", pod, f"--container={container}", "--timestamps", *words)
        except OutsideError as error:
            if not any(reason in str(error) for reason in _NO_LINES):
                raise
    return ""


def new_lines(lines: list[str], last: str) -> list[str]:
    """Return the lines behind the last one that was seen: kubectl knows whole seconds alone."""
    return lines[len(lines) - lines[::-1].index(last) :] if last in lines else lines


def _selector(run: RunFolder) -> str:
    return f"--selector={JOB_LABEL}={run.job.name}"


def _kubectl(run: RunFolder) -> Kubectl:
    return Kubectl(run.job, run.path, ASK_TIMEOUT_S)


def _name_of(found: Found) -> str:
    return f"{found['kind'].lower()}/{found['metadata']['name']}"

"""Runs on a Slurm cluster, by scontrol, sacct and scancel."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.clusters.running.cluster import ASK_TIMEOUT_S, Cleaned, LogTail, RunFolder, is_alive
from launcher.clusters.running.folder_logs import open_folder_logs
from launcher.clusters.running.slurm_nodes import clean_nodes
from launcher.clusters.running.slurm_size import added_name, find_added, scale_job, with_added
from launcher.clusters.slurm_submit import submit_slurm
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError
from launcher.monitor.logs import first_end, last_words, read_tail
from launcher.monitor.standing import JobStatus, Phase

_PHASES: Mapping[str, Phase] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), Phase.QUEUED),
    "COMPLETED": Phase.SUCCEEDED,
    "CANCELLED": Phase.CANCELLED,
    "REVOKED": Phase.CANCELLED,
    **dict.fromkeys(("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL"), Phase.FAILED),
    **dict.fromkeys(("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"), Phase.FAILED),
}
"""By Slurm's word; a job in any other state has its nodes."""
_ASKED_STATUS = 143
_ASKED_CODE = f"{_ASKED_STATUS}:0"
"""Of a job whose agents were asked to end, by somebody or by srun, and have ended."""
_ASKED = "its processes got SIGTERM"
_FAILED = "Slurm's state is FAILED"
_EARLY_S = 60
"""So much before the warning time Slurm may send its signal."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_ALIVE_STATES = "PENDING,CONFIGURING,RUNNING,STOPPED,SUSPENDED,COMPLETING"
"""Of a job that has not ended. Its agents save their step while it is COMPLETING."""
_FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that ended some minutes ago, and of one that never was."""
_SACCT_FIELDS = ("JobName", "State", "ExitCode", "NodeList", "Elapsed", "Timelimit")


class SlurmRuns:
    """The Slurm cluster that this machine's commands reach."""

    def submit(self, run: RunFolder) -> Submission:
        """Hand the run's script to sbatch. Raises OutsideError with its words."""
        return submit_slurm(run.path, run.job)

    def status(self, run: RunFolder) -> JobStatus:
        """Return what the controller says of the job, or the accounting where it has forgotten.

        A run whose own job has ended goes on as long as nodes that were added to it do.
        """
        if not run.job_id:
            return JobStatus(phase=Phase.FORGOTTEN, why="it was not submitted")
        said = self._status_of_job(run, run.job_id)
        if said.phase is Phase.UNREACHABLE:
            return said
        try:
            said = with_added(said, run.job_id, find_added(run))
            others = _find_others(run)
        except OutsideError as error:
            return JobStatus(phase=Phase.UNREACHABLE, why=str(error), place=said.place)
        if not others:
            return said
        why = f"job {', '.join(others)} was submitted in the same folder"
        if said.phase.has_ended:
            # By hand, with the run's script: it is the run now.
            why = f"job {run.job_id} has ended, and {why}"
            said = self._status_of_job(run, others[0])
        return replace(said, why="; ".join(filter(None, (said.why, why))))

    def _status_of_job(self, run: RunFolder, job_id: str) -> JobStatus:
        warned_s = run.job.slurm.signal_before_end_s or 0
        show = ("scontrol", "show", "job", "--oneliner", job_id)
        try:
            text = run_program(show, run.path, timeout_s=ASK_TIMEOUT_S)
            return _explain(read_job(text, run.job.name, warned_s), run, job_id)
        except OutsideError as error:
            if _FORGOTTEN not in str(error):
                return JobStatus(phase=Phase.UNREACHABLE, why=str(error))
        account = (
            *("sacct", "--allocations", "--parsable2", "--noheader", "--duplicates"),
            *(f"--format={','.join(_SACCT_FIELDS)}", f"--jobs={job_id}"),
        )
        try:
            text = run_program(account, run.path, timeout_s=ASK_TIMEOUT_S)
            return _explain(read_account(text, run.job.name, warned_s), run, job_id)
        except OutsideError:
            # Many clusters keep no accounts.
            return JobStatus(phase=Phase.FORGOTTEN, why=f"Slurm knows no job {job_id} any more")

    def events(self, run: RunFolder) -> Path:
        """Return the file in the run's folder."""
        return run.events

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the nodes of the job print, in all its starts, and its script."""
        names = (
            *(f"{run.job.name}-{run.job_id}.log", f"{added_name(run)}-*.log"),
            f"logs/slurm-{run.job_id}.*.log",
        )
        return open_folder_logs(run.path, names, rank)

    def cancel(self, run: RunFolder) -> None:
        """Have Slurm end the job: SIGTERM to what runs, and SIGKILL after the cluster's KillWait.

        With it goes what was added, at the same moment: so the run stops, and does not only lose
        nodes. Raises OutsideError with scancel's words.
        """
        self._end_jobs(run)

    def _end_jobs(self, run: RunFolder) -> list[str]:
        """End all jobs of the run that wait or run, and return their numbers."""
        jobs = [run.job_id] if is_alive(self._status_of_job(run, run.job_id)) else []
        jobs += _find_others(run)
        jobs += [each.job_id for each in find_added(run) if each.is_alive]
        if jobs:
            run_program(("scancel", *jobs), run.path, timeout_s=ASK_TIMEOUT_S)
        return jobs

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Have jobs of one node each come to the run, or end those that came last.

        Raises RecipeError where the run's own job does not run, or has more nodes.
        """
        scale_job(run, num_nodes)

    def clean(self, run: RunFolder) -> Cleaned:
        """Take the job out of the queue, and remove the run's memory on the nodes that it had."""
        removed = [f"job {job_id} from the queue" for job_id in self._end_jobs(run)]
        memory = clean_nodes(run)
        return Cleaned(removed=(*removed, *memory.removed), left=memory.left)


def _explain(said: JobStatus, run: RunFolder, job_id: str) -> JobStatus:
    """Add which agent ended a job that has failed, by the job's log and that of the agent's node.

    srun ends the other agents by SIGTERM, whose status may become that of the job.
    """
    was_asked = said.phase is Phase.CANCELLED and said.why == _ASKED
    if not was_asked and not said.why.startswith(_FAILED):
        return said
    lines = read_tail(run.path / f"{run.job.name}-{job_id}.log")
    node, status = first_end(lines) or ("", 0)
    goes_on = run.job.resilience.checkpointless is not None
    if status == _ASKED_STATUS or (was_asked and (goes_on or not node)):
        return said
    if was_asked:
        said = replace(said, phase=Phase.FAILED, why=f"exit status {status}" if status else "")
    if status is None:
        return said if goes_on else replace(said, cause=f"the agent of {node} was killed")
    logs = sorted(run.path.glob(f"logs/slurm-{job_id}.*.{glob.escape(node)}.log"))
    tail = read_tail(logs[-1]) if logs else []
    words = last_words(tail) or "".join(tail[-1:])
    return replace(said, words=f"{node}: {words}" if words else last_words(lines))


def _find_others(run: RunFolder) -> list[str]:
    """Return the other jobs of the run's folder that have not ended. Raises OutsideError."""
    which = (f"--name={run.job.name}", f"--states={_ALIVE_STATES}")
    command = ("squeue", "--noheader", "--me", *which, "--format=%A %Z")
    text = run_program(command, run.path, timeout_s=ASK_TIMEOUT_S)
    found = [line.strip().partition(" ") for line in text.splitlines()]
    ours = {job_id for job_id, _, folder in found if Path(folder) == run.path.resolve()}
    return sorted(ours - {run.job_id}, key=int)


def read_job(text: str, name: str, warned_s: int = 0) -> JobStatus:
    """Return what a line of `scontrol show job --oneliner` says of a job that has this name.

    Its agents are asked to end `warned_s` before its time limit. Raises OutsideError where it is
    no such line.
    """
    fields: dict[str, str] = {}
    for field, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", text):
        # The first counts: what a person has written, such as a comment, stands behind.
        fields.setdefault(field, value)
    state, nodes = fields.get("JobState"), fields.get("NodeList", "")
    if state is None:
        raise OutsideError(f"scontrol printed no job but {text.strip()!r}")
    if fields.get("JobName") != name:
        return _other_job(fields.get("JobName", ""))
    end = ""
    if fields.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"):
        end = f"Slurm preempted it at {fields['PreemptTime']}, and does not queue it again"
    elif _reached(fields.get("RunTime", ""), fields.get("TimeLimit", ""), warned_s):
        end = f"its time limit of {fields['TimeLimit']} ended it"
    return _judge(state, fields.get("Reason", ""), fields.get("ExitCode", ""), nodes, end)


def read_account(text: str, name: str, warned_s: int = 0) -> JobStatus:
    """Return what sacct says of a job that has this name: its last start counts."""
    lines = [line.split("|") for line in text.splitlines() if line.count("|") == 5]
    if not lines:
        return JobStatus(phase=Phase.FORGOTTEN, why="Slurm's accounting has no such job")
    found, state, code, nodes, elapsed, limit = lines[-1]
    if found != name:
        return _other_job(found)
    word, _, by = state.partition(" ")
    end = f"its time limit of {limit} ended it" if _reached(elapsed, limit, warned_s) else ""
    by = f"cancelled {by.replace('by', 'by user')}" if by else ""
    return _judge(word, by, code, nodes, end)


def _reached(elapsed: str, limit: str, warned_s: int) -> bool:
    """Return whether a job has run for as long as it takes until its limit has it end."""
    times = [_TIME.fullmatch(each) for each in (elapsed, limit)]
    seconds = [
        ((int(each[1] or 0) * 24 + int(each[2])) * 60 + int(each[3])) * 60 + int(each[4])
        for each in times
        if each
    ]
    return len(seconds) == 2 and seconds[0] >= seconds[1] - warned_s - _EARLY_S


def _other_job(name: str) -> JobStatus:
    return JobStatus(
        phase=Phase.FORGOTTEN, why=f"Slurm has given the job's number to another, {name!r}"
    )


def _judge(state: str, reason: str, code: str, nodes: str, end: str) -> JobStatus:
    """Return how a job stands; `end` says what has ended it where its agents were asked to."""
    phase = _PHASES.get(state, Phase.RUNNING)
    was_asked = state == "FAILED" and code == _ASKED_CODE
    if end and (was_asked or state == "PREEMPTED"):
        return JobStatus(phase=Phase.FAILED, why=end, place=nodes)
    if was_asked:
        return JobStatus(phase=Phase.CANCELLED, why=_ASKED, place=nodes)
    parts = [] if reason in ("", "None") else [reason]
    place = "" if nodes in ("(null)", "None assigned") else nodes
    if phase is Phase.RUNNING and state != "RUNNING":
        parts = [f"Slurm's state is {state}", *parts]
    if phase is Phase.FAILED:
        status, _, number = code.partition(":")
        ended = f"signal {number}" if number not in ("", "0") else f"exit status {status}"
        parts = [f"Slurm's state is {state}, {ended}", *(each for each in parts if each != state)]
    if phase is Phase.CANCELLED:
        # What it waited for when it was cancelled says nothing of its end.
        parts = [each for each in parts if " " in each]
    return JobStatus(phase=phase, why=", ".join(parts), place=place)

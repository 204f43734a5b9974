"""Runs on a Slurm cluster, by scontrol, sacct and scancel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from launcher.clusters.running.cluster import ASK_TIMEOUT_S, Cleaned, LogTail, RunFolder, is_alive
from launcher.clusters.running.folder_logs import open_folder_logs
from launcher.clusters.running.slurm_nodes import clean_nodes
from launcher.clusters.slurm_submit import submit_slurm
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError, RecipeError
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
_FORGOTTEN = "Invalid job id"
"""What scontrol says of a job that ended some minutes ago, and of one that never was."""
_SACCT_FIELDS = ("JobName", "State", "ExitCode", "NodeList")


class SlurmRuns:
    """The Slurm cluster that this machine's commands reach."""

    def submit(self, run: RunFolder) -> Submission:
        """Hand the run's script to sbatch. Raises OutsideError with its words."""
        return submit_slurm(run.path)

    def status(self, run: RunFolder) -> JobStatus:
        """Return what the controller says of the job, or the accounting where it has forgotten."""
        if not run.job_id:
            return JobStatus(phase=Phase.FORGOTTEN, why="it was not submitted")
        show = ("scontrol", "show", "job", "--oneliner", run.job_id)
        try:
            return read_job(run_program(show, run.path, timeout_s=ASK_TIMEOUT_S), run.job.name)
        except OutsideError as error:
            if _FORGOTTEN not in str(error):
                return JobStatus(phase=Phase.UNREACHABLE, why=str(error))
        account = (
            *("sacct", "--allocations", "--parsable2", "--noheader", "--duplicates"),
            *(f"--format={','.join(_SACCT_FIELDS)}", f"--jobs={run.job_id}"),
        )
        try:
            return read_account(
                run_program(account, run.path, timeout_s=ASK_TIMEOUT_S), run.job.name
            )
        except OutsideError:
            # Many clusters keep no accounts.
            return JobStatus(phase=Phase.FORGOTTEN, why=f"Slurm knows no job {run.job_id} any more")

    def events(self, run: RunFolder) -> Path:
        """Return the file in the run's folder."""
        return run.events

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the nodes of the job print, in all its starts, and its script."""
        names = (f"{run.job.name}-{run.job_id}.log", f"logs/slurm-{run.job_id}.*.log")
        return open_folder_logs(run.path, names, rank)

    def cancel(self, run: RunFolder) -> None:
        """Have Slurm end the job: SIGTERM to what runs, and SIGKILL after the cluster's KillWait.

        Raises OutsideError with scancel's words.
        """
        if is_alive(self.status(run)):
            run_program(("scancel", run.job_id), run.path, timeout_s=ASK_TIMEOUT_S)

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Refuse: runs keep their size here."""
        raise RecipeError(f"{run.job.name} runs on Slurm, where runs keep their size")

    def clean(self, run: RunFolder) -> Cleaned:
        """Take the job out of the queue, and remove the run's memory on the nodes that it had."""
        removed = []
        if is_alive(self.status(run)):
            run_program(("scancel", run.job_id), run.path, timeout_s=ASK_TIMEOUT_S)
            removed.append(f"job {run.job_id} from the queue")
        memory = clean_nodes(run)
        return Cleaned(removed=(*removed, *memory.removed), left=memory.left)


def read_job(text: str, name: str) -> JobStatus:
    """Return what a line of `scontrol show job --oneliner` says of a job that has this name.

    Raises OutsideError where it is no such line.
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
    return _judge(state, fields.get("Reason", ""), fields.get("ExitCode", ""), nodes)


def read_account(text: str, name: str) -> JobStatus:
    """Return what sacct says of a job that has this name: its last start counts."""
    lines = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    if not lines:
        return JobStatus(phase=Phase.FORGOTTEN, why="Slurm's accounting has no such job")
    found, state, code, nodes = lines[-1]
    if found != name:
        return _other_job(found)
    word, _, by = state.partition(" ")
    return _judge(word, f"cancelled {by.replace('by', 'by user')}" if by else "", code, nodes)


def _other_job(name: str) -> JobStatus:
    return JobStatus(
        phase=Phase.FORGOTTEN, why=f"Slurm has given the job's number to another, {name!r}"
    )


def _judge(state: str, reason: str, code: str, nodes: str) -> JobStatus:
    phase = _PHASES.get(state, Phase.RUNNING)
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

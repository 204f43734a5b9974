"""The size of a run on Slurm: jobs of one node each, added to the run's own and taken away again.

Slurm lets no job grow without accounting, so each further node is a job of its own. Which there are
Slurm alone says: they are named after the run's job. Which of them were asked to leave, their
scripts note in the run's folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from launcher.clusters.passed import sbatch_environment
from launcher.clusters.running.cluster import ASK_TIMEOUT_S, RunFolder
from launcher.clusters.running.requests import write_size
from launcher.clusters.slurm import JOB_SCRIPT
from launcher.clusters.submission import run_program
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.standing import JobStatus, Phase

_FORMAT = "%i|%T|%N|%r"
_WAITS = frozenset({"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_STAYS = _WAITS | {"RESIZING", "RUNNING", "SIGNALING", "STOPPED", "SUSPENDED"}
"""A job in any other state has ended, or is on its way to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedJob:
    """A job that brings the run one more node."""

    job_id: str
    state: str
    node: str = ""
    reason: str = ""
    """Why it waits, in Slurm's word."""
    is_leaving: bool = False
    """Whether its agent was asked to leave the run."""

    @property
    def is_alive(self) -> bool:
        """Return whether it waits for its node, or has it."""
        return self.state in _STAYS

    @property
    def stays(self) -> bool:
        """Return whether the run has its node, or will, and has not asked it to leave."""
        return self.is_alive and not self.is_leaving

    @property
    def waits(self) -> bool:
        """Return whether it has no node yet."""
        return self.state in _WAITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePlan:
    """What brings a run to the size that it is to have."""

    num_submitted: int = 0
    withdrawn: tuple[str, ...] = ()
    """Jobs that wait, and come to nothing."""
    asked: tuple[str, ...] = ()
    """Jobs whose agents are asked to leave the run."""


def plan_size(num_own: int, added: Collection[AddedJob], wanted: int) -> SizePlan:
    """Return how many jobs are submitted, and which are ended, for so many nodes in all. Pure.

    `num_own` are those of the run's own job, which it keeps. Jobs that wait are ended first, then
    those that came last: a second call chooses the same.
    """
    staying = [each for each in added if each.stays]
    staying.sort(key=lambda each: (each.waits, int(each.job_id)))
    num_kept = max(0, wanted - num_own)
    return SizePlan(
        num_submitted=max(0, num_kept - len(staying)),
        withdrawn=tuple(each.job_id for each in staying[num_kept:] if each.waits),
        asked=tuple(each.job_id for each in staying[num_kept:] if not each.waits),
    )


def added_name(run: RunFolder) -> str:
    """Return the name of all jobs that are added to this one, as its script knows it."""
    return f"{run.job.name}-{run.job_id}-added"


def find_added(run: RunFolder) -> list[AddedJob]:
    """Return the jobs that were added to the run and have not ended. Raises OutsideError."""
    if run.job.resilience.elastic is None or not run.job_id:
        return []
    command = ("squeue", "--noheader", "--me", f"--name={added_name(run)}", f"--format={_FORMAT}")
    found = read_added(run_program(command, run.path, timeout_s=ASK_TIMEOUT_S))
    # A job's script makes this file when its agent is asked to leave.
    left = run.path / "added"
    return [replace(each, is_leaving=(left / f"{each.job_id}.left").exists()) for each in found]


def read_added(text: str) -> list[AddedJob]:
    """Return the jobs that squeue has printed. Raises OutsideError for a line that is none. Pure.

    Whether one is leaving Slurm does not know.
    """
    found = []
    for line in text.splitlines():
        job_id, *more = line.strip().split("|")
        if not job_id.isdecimal() or len(more) != len(_FORMAT.split("|")) - 1:
            raise OutsideError(f"squeue printed no job but {line!r}")
        state, node, reason = more
        found.append(AddedJob(job_id=job_id, state=state, node=node, reason=reason))
    return found


def with_added(said: JobStatus, job_id: str, added: Sequence[AddedJob]) -> JobStatus:
    """Return how a run stands by its own job and those that were added to it. Pure."""
    having = [each for each in added if each.is_alive and not each.waits]
    parts = [said.place] if said.place else []
    parts += [f"{each.node} by job {each.job_id}" for each in having]
    parts += [f"job {each.job_id} waits: {each.reason}" for each in added if each.waits]
    said = replace(said, place=", ".join(parts))
    if said.phase.is_alive or said.phase is Phase.UNREACHABLE or not having:
        return said
    why = f"job {job_id} is {said.phase.value}, and nodes that were added to it still run"
    return replace(said, phase=Phase.RUNNING, why=why)


def scale_job(run: RunFolder, num_nodes: int) -> None:
    """Submit and end jobs until the run has so many nodes, and return at once.

    Raises RecipeError, before anything is done, for a size that it cannot have, and OutsideError
    with the words of Slurm's commands.
    """
    show = ("scontrol", "show", "job", "--oneliner", run.job_id)
    text = run_program(show, run.path, timeout_s=ASK_TIMEOUT_S)
    check_owner(text, run.job_id, os.geteuid())
    num_own = read_num_nodes(text, run.job_id)
    wanted = check_size(run, num_own, num_nodes)
    plan = plan_size(num_own, find_added(run), wanted)
    write_size(run, num_nodes)
    for words, jobs in (((), plan.withdrawn), (("--batch", "--signal=USR1"), plan.asked)):
        if jobs:
            run_program(("scancel", "--quiet", *words, *jobs), run.path, timeout_s=ASK_TIMEOUT_S)
    for _ in range(plan.num_submitted):
        run_program(_submission(run), run.path, environment=sbatch_environment(run.job)[0])


def check_owner(text: str, job_id: str, uid: int) -> None:
    """Raise RecipeError where a job, by its line of scontrol, is another user's. Pure."""
    owner = re.search(r"(?:^|\s)UserId=([^\s(]*)\((\d+)\)", text)
    if owner and int(owner[2]) != uid:
        raise RecipeError(f"job {job_id} is that of user {owner[1]}; allowed: {owner[1]} scales it")


def read_num_nodes(text: str, job_id: str) -> int:
    """Return how many nodes a job has by its line of `scontrol show job --oneliner`. Pure.

    Raises RecipeError where it does not run.
    """
    fields = dict(re.findall(r"(?:^|\s)(JobState|NumNodes)=(\w+)", text))
    if fields.get("JobState") != "RUNNING" or not fields.get("NumNodes", "").isdecimal():
        raise RecipeError(
            f"job {job_id} does not run: Slurm's state is {fields.get('JobState', 'unknown')}; "
            "scale it when it does, or have a job that waits begin with N nodes: "
            f"scontrol update jobid={job_id} numnodes=N"
        )
    return int(fields["NumNodes"])


def check_size(run: RunFolder, num_own: int, num_nodes: int) -> int:
    """Return how many nodes a run of a size has, those that stand by among them. Pure.

    Raises RecipeError for one that is less than the run's own job has.
    """
    elastic = run.job.resilience.elastic
    assert elastic
    allowed = [size for size in elastic.sizes if run.job.num_nodes_at(size) >= num_own]
    if num_nodes not in allowed:
        raise RecipeError(
            f"job {run.job_id} has {num_own} nodes, and keeps them: nodes that were added to it "
            f"leave the run; allowed: {', '.join(map(str, allowed))}. With fewer it goes on after "
            f"scontrol requeue {run.job_id} and scontrol update jobid={run.job_id} numnodes=N"
        )
    return run.job.num_nodes_at(num_nodes)


def _submission(run: RunFolder) -> tuple[str, ...]:
    seconds = run.job.slurm.signal_before_end_s
    return (
        *("sbatch", "--parsable", f"--job-name={added_name(run)}", "--nodes=1"),
        # Two agents of one run on a node would have one name.
        "--exclusive",
        # At its own limit the node leaves the run, which goes on.
        *((f"--signal=B:USR1@{seconds}",) if seconds is not None else ()),
        *(JOB_SCRIPT, run.job_id),
    )

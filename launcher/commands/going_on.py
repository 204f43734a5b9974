"""The command `continue`: a run that has ended goes on from its newest state, in its folder."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.clusters.agent import Intent
from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.commands.sight import find_run, see_run
from launcher.composition.changing import ChangedJob, change_job
from launcher.composition.instances import check_instance
from launcher.errors import OutsideError, RecipeError
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.monitor.checkpoints import newest_saved
from launcher.monitor.runstate import LAUNCHER_NODE
from launcher.monitor.standing import Phase
from launcher.paths import Folders, find_folders
from launcher.render import render
from launcher.rundir import EVENTS_FILE, held_folder, next_job_number, replace_job, write_submission
from launcher.support import check_runnable, check_trainer_installed
from launcher.templates import read_templates
from resilience.events import EventLog

_ACTIONS = {True: "run", False: "submit"}
STATE_FOLDER = "state"
"""Where a run with recovery keeps the state of each epoch's end."""
_TAKE_OVER = "run.take_over=true"
_NEW_RUN = "start another run with that: its recipe, with these overrides"


def continue_run(arguments: Sequence[str], start: Path) -> int:
    """Go on with a run, with other values for some keys; returns the exit status.

    Raises RecipeError where nothing was changed, and OutsideError.
    """
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        raise RecipeError(
            "continue takes a run first, its folder or its name below ./runs; `runs` shows them"
        )
    run = find_run(arguments[0], start)
    overrides = [each for each in arguments[1:] if each != _TAKE_OVER]
    takes_over = len(overrides) < len(arguments) - 1
    with held_folder(run.path):
        number = next_job_number(run.path)
        cluster = cluster_of(run.job)
        _check_ended(run, cluster)
        changed = change_job(run.job, overrides, hint=_NEW_RUN)
        _check_goal(run, cluster, changed.job)
        folders = find_folders(start)
        _check_job(run.job, changed.job, folders, has_state=_has_epochs(run))
        templates = read_templates(folders.templates, changed.job.cluster.kind)
        files = render(
            changed.job,
            templates,
            Intent(goes_on=not takes_over and _may_have_saved(run, cluster), takes_over=takes_over),
        )
        replace_job(run.path, files, number)
        _tell(run, changed)
        return _start(RunFolder(path=run.path, job=changed.job), cluster)


def _check_ended(run: RunFolder, cluster: Cluster) -> None:
    sight = see_run(run, cluster)
    if sight.standing.phase is Phase.UNREACHABLE:
        raise OutsideError(f"{run.job.name} does not go on: {sight.standing.why}")
    if sight.standing.phase.is_alive:
        raise RecipeError(
            f"{run.job.name} is {sight.standing.phase.value}; end it first, with "
            f"launcher cancel {shlex.quote(str(run.path))}"
        )


def _may_have_saved(run: RunFolder, cluster: Cluster) -> bool:
    """Return whether the run's events say that it has saved its state.

    Where they are not here, the run's record says it to its agents.
    """
    return newest_saved(see_run(run, cluster).state.tiers) is not None


def _check_goal(run: RunFolder, cluster: Cluster, job: Job) -> None:
    sight = see_run(run, cluster)
    is_done = sight.standing.phase is Phase.SUCCEEDED
    taken = sight.state.num_steps
    if job.trainer.max_steps < taken:
        raise RecipeError(
            f"trainer.max_steps {job.trainer.max_steps} is less than the {taken} steps that "
            f"{run.job.name} has taken"
        )
    tiered = run.job.resilience.tiered
    if is_done and tiered is not None and tiered.store is None and not _has_epochs(run):
        raise RecipeError(
            f"{run.job.name} has succeeded, and its checkpoints went with the memory of its nodes; "
            "a run that is to be longer some day needs resilience.tiered.store"
        )
    if is_done and job.trainer.max_steps <= run.job.trainer.max_steps:
        steps = run.job.trainer.max_steps
        raise RecipeError(
            f"{run.job.name} has taken all its {steps} steps; give it more, as "
            f"trainer.max_steps={2 * steps}"
        )


def _has_epochs(run: RunFolder) -> bool:
    """Return whether a run with recovery has left the state of an epoch's end in its folder."""
    return any((run.path / STATE_FOLDER).glob("step-*"))


def _check_job(before: Job, job: Job, folders: Folders, *, has_state: bool) -> None:
    is_local = isinstance(job.cluster, LocalCluster)
    if job.resilience.tiered is None and not has_state:
        raise RecipeError(
            f"{job.name} keeps no state to go on from: resilience.tiered is null in its job; a run "
            "with resilience/tiered=ram, ram_s3, s3 or folder keeps one"
        )
    check_instance(job.instance, folders.conf)
    check_runnable(job, _ACTIONS[is_local])
    if is_local:
        from launcher.inputs import check_inputs
        from launcher.machine import check_machine, read_machine

        if (before.trainer, before.resources) != (job.trainer, job.resources):
            check_machine(job, read_machine())
        check_inputs(job)
        check_trainer_installed()


def _tell(run: RunFolder, changed: ChangedJob) -> None:
    """Say what changes, and note it among the run's events where these are in its folder."""
    told = [str(each) for each in changed.told]
    sys.stdout.write(f"{run.job.name} goes on in {run.path}\n")
    for each in told:
        sys.stdout.write(f"  {each}\n")
    sys.stdout.flush()
    if (run.path / EVENTS_FILE).exists():
        path = run.path / EVENTS_FILE
        with EventLog(path, node=LAUNCHER_NODE, rank=None, generation=0) as events:
            events.write("run_continued", changes=told)


def _start(run: RunFolder, cluster: Cluster) -> int:
    if isinstance(run.job.cluster, LocalCluster):
        from launcher.clusters.local_run import run_nodes

        return run_nodes(run.job, run.path)
    submission = cluster.submit(run)
    write_submission(run.path, dataclasses.asdict(submission))
    sys.stdout.write(f"submitted job {submission.job_id}: {shlex.join(submission.command)}\n")
    return 0

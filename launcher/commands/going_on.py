"""The command `continue`: a run that has ended goes on from its newest state, in its folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.clusters.agent import Intent
from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.folder_logs import newest_generation
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.starting import start_run
from launcher.commands.sight import Sight, find_run, see_run
from launcher.composition.changing import ChangedJob, change_job
from launcher.composition.instances import check_instance
from launcher.errors import OutsideError, RecipeError
from launcher.holding import held_folder
from launcher.inputs import check_inputs, check_take_over
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.job.workload import ScriptTrainer
from launcher.monitor.checkpoints import newest_saved
from launcher.monitor.runstate import LAUNCHER_NODE
from launcher.monitor.standing import Phase
from launcher.paths import Folders, find_folders
from launcher.render import render
from launcher.rundir import EVENTS_FILE, next_job_number, replace_job
from launcher.support import check_runnable, check_trainer_installed
from launcher.templates import read_templates
from resilience.event_files import event_files
from resilience.events import EventLog

_ACTIONS = {True: "run", False: "submit"}
_TAKE_OVER, _DETACH = "run.take_over", "run.detach"
NEW_RUN = "start another run with that: its recipe, with these overrides"
"""What to do where no state of a run fits a job."""


def continue_run(arguments: Sequence[str], start: Path) -> int:
    """Go on with a run, with other values for some keys; returns the exit status.

    Raises RecipeError where nothing was changed, and OutsideError.
    """
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        raise RecipeError(
            "continue takes a run first, its folder or its name below ./runs; `runs` shows them"
        )
    run = find_run(arguments[0], start)
    flags, overrides = _split_flags(arguments[1:])
    takes_over, is_detached = flags[_TAKE_OVER], flags[_DETACH]
    if is_detached and not isinstance(run.job.cluster, LocalCluster):
        raise RecipeError("run.detach true: a submitted run goes on by itself; leave it out")
    cluster = cluster_of(run.job)
    _see_ended(run, cluster)
    with held_folder(run.path):
        number = next_job_number(run.path)
        sight = _see_ended(run, cluster)
        changed = change_job(run.job, overrides, hint=NEW_RUN)
        _check_goal(sight, changed.job)
        folders = find_folders(start)
        check_job(run.job, changed.job, folders)
        if takes_over:
            check_take_over(changed.job, run.path)
        templates = read_templates(folders.templates, changed.job.cluster.kind)
        # Where its events are not here, the run's record says it to its agents.
        goes_on = not takes_over and newest_saved(sight.state.tiers) is not None
        intent = Intent(goes_on=goes_on, continues=True, takes_over=takes_over)
        files = render(changed.job, templates, intent)
        replace_job(run.path, files, number)
        sys.stdout.write(f"{run.job.name} goes on in {run.path}\n")
        has_events = bool(event_files(run.path / EVENTS_FILE))
        tell_changes(run, changed, "run_continued", {}, is_claimed=has_events)
        started = RunFolder(path=run.path, job=changed.job)
        return start_run(started, is_detached=is_detached, is_new=False)


def _split_flags(arguments: Sequence[str]) -> tuple[dict[str, bool], list[str]]:
    """Return what is said of this start alone, and the keys of the job that are to change."""
    flags, overrides = {_TAKE_OVER: False, _DETACH: False}, []
    for argument in arguments:
        key, is_assignment, value = argument.partition("=")
        if not is_assignment or key not in flags:
            overrides.append(argument)
        elif value.lower() in ("true", "false"):
            flags[key] = value.lower() == "true"
        else:
            raise RecipeError(f"{key} {value!r}: allowed: true, false")
    return flags, overrides


def _see_ended(run: RunFolder, cluster: Cluster) -> Sight:
    sight = see_run(run, cluster)
    if sight.standing.phase is Phase.UNREACHABLE:
        raise OutsideError(f"{run.job.name} does not go on: {sight.standing.why}")
    if sight.standing.phase.is_alive:
        raise RecipeError(
            f"{run.job.name} is {sight.standing.phase.value}; end it first, with "
            f"launcher cancel {shlex.quote(str(run.path))}"
        )
    return sight


def _check_goal(sight: Sight, job: Job) -> None:
    run, taken = sight.run, sight.state.num_steps
    is_done = sight.standing.phase is Phase.SUCCEEDED
    before, after = run.job.training, job.training
    if before is None or after is None:
        # A program knows itself how far it has come.
        return
    if after.trainer.max_steps < taken:
        raise RecipeError(
            f"trainer.max_steps {after.trainer.max_steps} is less than the {taken} steps that "
            f"{run.job.name} has taken"
        )
    tiered = run.job.resilience.tiered
    if is_done and tiered is not None and tiered.store is None:
        raise RecipeError(
            f"{run.job.name} has succeeded, and its checkpoints went with the memory of its nodes; "
            "a run that is to be longer some day needs resilience.tiered.store"
        )
    steps = before.trainer.max_steps
    # It has fewer where it was to be longer, and that start was refused or lost.
    has_all = not taken or steps - taken < before.trainer.log_every_n_steps
    if is_done and has_all and after.trainer.max_steps <= steps:
        raise RecipeError(
            f"{run.job.name} has taken all its {steps} steps; give it more, as "
            f"trainer.max_steps={2 * steps}"
        )


def check_job(before: Job | None, job: Job, folders: Folders) -> None:
    """Raise RecipeError where a run could not go on, or begin, with a job.

    `before` is the job that this machine has trained before.
    """
    is_local = isinstance(job.cluster, LocalCluster)
    if job.resilience.tiered is None and not isinstance(job.trainer, ScriptTrainer):
        raise RecipeError(
            f"{job.name} keeps no state to go on from: resilience.tiered is null in its job; a run "
            "keeps one that leaves resilience/tiered as it is, or chooses tiers"
        )
    check_instance(job.instance, folders.conf)
    check_runnable(job, _ACTIONS[is_local])
    if is_local:
        from launcher.machine import check_machine, read_machine

        if before is None or (before.trainer, before.resources) != (job.trainer, job.resources):
            check_machine(job, read_machine())
        check_inputs(job)
        check_trainer_installed(job)


def tell_changes(
    run: RunFolder, changed: ChangedJob, event: str, fields: Mapping[str, Any], *, is_claimed: bool
) -> None:
    """Say what changes, and note it among the run's events where these are in its folder."""
    told = [str(each) for each in changed.told]
    for each in told:
        sys.stdout.write(f"  {each}\n")
    sys.stdout.flush()
    if is_claimed:
        path = run.path / EVENTS_FILE
        newest = newest_generation(path)
        with EventLog(path, node=LAUNCHER_NODE, rank=None, generation=newest) as events:
            events.write(event, changes=told, **fields)

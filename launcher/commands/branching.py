"""The command `branch`: a new run that begins with a state of another one."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.clusters.agent import Intent
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.starting import start_run
from launcher.commands.going_on import NEW_RUN, check_job, tell_changes
from launcher.commands.sight import find_run, see_run
from launcher.commands.stored import run_place, store_url, stored_steps
from launcher.composition.changing import ChangedJob, change_job, parse_overrides, rename_job
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.cluster import LocalCluster
from launcher.job.lineage import checkpoints_namespace
from launcher.job.workload import ScriptTrainer
from launcher.paths import find_folders
from launcher.render import render
from launcher.rundir import EVENTS_FILE, SUBMITTED_FILE, write_run_dir
from launcher.templates import read_templates
from resilience.node_config import BranchPoint

_OF_RUN = ("run.name", "run.dir", "run.detach")
_SHOWN_MAX = 8
"""More steps than this tell a person no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the command line asks for."""

    word: str
    """The run to branch from."""
    step: int | None
    name: str | None
    folder: str | None
    is_detached: bool
    overrides: tuple[str, ...]


def branch_run(arguments: Sequence[str], start: Path) -> int:
    """Start a run that begins with another's state; returns the exit status.

    Raises RecipeError where nothing was written, and OutsideError.
    """
    asked = _read(arguments)
    run = find_run(asked.word, start)
    if isinstance(run.job.trainer, ScriptTrainer):
        raise RecipeError(
            f"{run.job.name} runs a script, whose states only its program knows; branch needs "
            "a run of a trainer of ours: start another run with the program's own checkpoints"
        )
    point = _find_point(run, asked.step)
    changed = _change(run.job, asked)
    job = changed.job
    if job.training and job.training.trainer.max_steps <= point.step:
        raise RecipeError(
            f"trainer.max_steps {job.trainer.max_steps}: the run would begin with step "
            f"{point.step}, and have nothing to do; give it more"
        )
    folders = find_folders(start)
    check_job(None, job, folders)
    is_local = isinstance(job.cluster, LocalCluster)
    if asked.is_detached and not is_local:
        raise RecipeError("run.detach true: a submitted run goes on by itself; leave it out")
    files = render(job, read_templates(folders.templates, job.cluster.kind), Intent(branch=point))
    claim = EVENTS_FILE if is_local else SUBMITTED_FILE
    folder = write_run_dir(asked.folder, job.name, start, files, claim)
    sys.stdout.write(f"{job.name} begins in {folder} with step {point.step} of {point.run}\n")
    if asked.step is None and (taken := see_run(run, cluster_of(run.job)).state.num_steps):
        sys.stdout.write(f"  its newest in the store, of {taken} steps that are taken\n")
    branch = RunFolder(path=folder, job=job)
    fields = {"run": point.run, "from_step": point.step}
    tell_changes(branch, changed, "run_branched", fields, is_claimed=is_local)
    return start_run(branch, is_detached=asked.is_detached)


def _read(arguments: Sequence[str]) -> _Request:
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        raise RecipeError(
            "branch takes a run first, its folder or its name below ./runs, with @STEP behind it "
            "for another state than its newest; `runs` shows them"
        )
    word, at, text = arguments[0].rpartition("@")
    if not at:
        word, text = text, ""
    elif not (text.isascii() and text.isdecimal()):
        raise RecipeError(f"branch {arguments[0]!r}: behind @ stands a step, a whole number")
    own = [each for each in arguments[1:] if each.partition("=")[0] in _OF_RUN]
    values = {key: value for key, value in parse_overrides(own) if value is not None}
    detach = values.get("run.detach", False)
    if not isinstance(detach, bool):
        raise RecipeError(f"run.detach {detach!r}: allowed: true, false")
    return _Request(
        word=word,
        step=int(text) if text else None,
        name=str(values["run.name"]) if "run.name" in values else None,
        folder=str(values["run.dir"]) if "run.dir" in values else None,
        is_detached=detach,
        overrides=tuple(each for each in arguments[1:] if each not in own),
    )


def _change(before: Job, asked: _Request) -> ChangedJob:
    """Return the job of the branch, in a namespace of its own."""
    named = any(each.startswith("resilience.tiered.namespace=") for each in asked.overrides)
    tiered = before.resilience.tiered
    own = () if named or tiered is None else ("resilience.tiered.namespace=null",)
    changed = change_job(before, [*asked.overrides, *own], hint=NEW_RUN)
    if named and tiered and changed.job.resilience.tiered:
        name = changed.job.resilience.tiered.namespace
        if name is not None and name == tiered.namespace:
            raise RecipeError(
                f"resilience.tiered.namespace {name!r} is that of {before.name}; a branch has "
                "checkpoints of its own: choose another, or leave it out"
            )
    job = rename_job(changed.job, asked.name or f"{before.name}-branch")
    return dataclasses.replace(changed, job=job)


def _find_point(run: RunFolder, step: int | None) -> BranchPoint:
    """Return the state to begin with. Raises RecipeError where no store has it."""
    tiered, job = run.job.resilience.tiered, run.job
    store = tiered.store if tiered is not None else None
    if tiered is None or store is None or store.url is None or not tiered.starts_memoryd:
        where = "keeps no state" if tiered is None else "keeps its states where no other run reads"
        raise RecipeError(
            f"{job.name} {where}; a branch needs a run with a store of ours: leave "
            "resilience/tiered as it is, or choose ram_s3, s3, folder or store"
        )
    there, within = run_place(run)
    point = BranchPoint(
        run=f"{job.name} in {there}",
        url=store_url(run, store),
        endpoint=store.endpoint,
        region=store.region,
        path_style=store.path_style,
        namespace=checkpoints_namespace(job, there, within=within),
        step=0,
    )
    return point.model_copy(update={"step": _choose_step(run, point, step)})


def _choose_step(run: RunFolder, point: BranchPoint, asked: int | None) -> int:
    """Return the step that is asked for, or the newest; RecipeError where it is known not to be."""
    name, stored = run.job.name, stored_steps(run)
    steps, damaged = (stored.whole, stored.damaged) if stored else (None, {})
    if steps is not None and asked is not None and asked not in steps:
        there = ", ".join(map(str, steps[:_SHOWN_MAX])) or "no whole step"
        state = f"is damaged ({damaged[asked]})" if asked in damaged else "is not"
        raise RecipeError(f"step {asked} of {name} {state} in {point.url}; the store has {there}")
    if asked is not None:
        return asked
    told = see_run(run, cluster_of(run.job)).state.storage.stored_step
    if steps is not None:
        # What the events tell no more is what the run has gone back behind.
        left = [each for each in steps if told is None or each <= told]
        if not left:
            raise RecipeError(f"the store {point.url} has no whole step of {name}")
        for step in sorted(each for each in damaged if each > left[0]):
            sys.stderr.write(f"step {step} of {name} is damaged: {damaged[step]}\n")
        return left[0]
    if told is None:
        raise RecipeError(
            f"no event here says that a step of {name} is in its store; where you know of one, "
            f"name it: branch {shlex.quote(str(run.path))}@STEP"
        )
    return told

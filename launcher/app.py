"""One job of the command line: resolve, render, and what `action` asks for.

Render, run and submit share everything up to the written files.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.clusters.agent import Intent
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.starting import start_run
from launcher.composition.choice import Choice
from launcher.composition.compose import CONFIG_NAME
from launcher.composition.frozen import File, Frozen, frozen_text
from launcher.composition.instances import check_instance
from launcher.composition.layers import read_layers
from launcher.composition.references import foreign_resolvers
from launcher.composition.resolve import Request, request_from_config
from launcher.errors import RecipeError
from launcher.inputs import check_inputs, check_take_over
from launcher.job.cluster import LocalCluster
from launcher.paths import Folders, lies_below
from launcher.plan.fit import check_fit, misfits
from launcher.provenance.fold import Fold, fold
from launcher.provenance.named import add_origins
from launcher.render import render
from launcher.rundir import (
    EVENTS_FILE,
    RECIPE_FILE,
    SUBMITTED_FILE,
    choose_run_dir,
    command_comment,
    write_run_dir,
)
from launcher.support import check_runnable, check_trainer_installed, printed_notes
from launcher.templates import read_templates
from launcher.versions.checking import find_changed_keys
from launcher.versions.folder import find_kept_sum
from launcher.versions.resolved import freeze_config, own_overrides
from resilience.signals import STOP_SIGNALS, delayed_signals


def launch(
    config: DictConfig, loaded: Mapping[str, File], folders: Folders, start: Path, choice: Choice
) -> int:
    """Do what a composed config asks for and return the exit status.

    `loaded` are the files that it was composed of, by their paths below conf/. Raises RecipeError
    before anything is written, and OutsideError.
    """
    sweep_number = _sweep_number()
    chosen = str(HydraConfig.get().runtime.choices["recipe"])
    request = request_from_config(
        config,
        "" if sweep_number is None else f"-{sweep_number}",
        None if chosen in choice.by_path else chosen,
        lambda problems: add_origins(problems, _fold_config(start)),
    )
    job, action = request.job, request.beside.action
    check_instance(job.instance, folders.conf, choice.frozen)
    _check_action(request)
    _check_asked(request, config, choice, start)
    intent = Intent(takes_over=request.beside.run.take_over)
    files = render(job, read_templates(folders.templates, job.cluster.kind), intent)
    words = [word for word in HydraConfig.get().overrides.task if not word.startswith("recipe=")]
    frozen = freeze_config(config, loaded, own_overrides(words), chosen).frozen
    if action != "render":
        command = command_comment(HydraConfig.get().overrides.task)
        files = {**files, RECIPE_FILE: frozen_text(frozen) + command}
    claim = {"run": EVENTS_FILE, "submit": SUBMITTED_FILE}.get(action)
    given = _given_dir(request.beside.run.dir, sweep_number)
    if intent.takes_over and claim is not None:
        check_take_over(job, choose_run_dir(given, job.name, start))
    is_detached = request.beside.run.detach
    # Once it has a folder, a run that waits for its nodes ends in order.
    ends_in_order = action == "run" and not is_detached
    with delayed_signals(*(STOP_SIGNALS if ends_in_order else ())):
        run_dir = write_run_dir(given, job.name, start, files, claim)
        _print_written(request, run_dir, files)
        # It was off until here: a run may go on for weeks.
        gc.enable()
        is_alone = sweep_number is None and chosen == frozen.name
        if is_alone and (note := _changed_recipe(frozen, folders, start)):
            sys.stderr.write(f"note: {note}\n")
        if action in ("run", "submit"):
            return start_run(RunFolder(path=run_dir, job=job), is_detached=is_detached)
    return 0


def _fold_config(start: Path) -> Fold:
    """Return who has set what in the config with which Hydra has called us."""
    given = HydraConfig.get().overrides
    return fold(read_layers(CONFIG_NAME, [*given.hydra, *given.task], start))


_GROUP_CHOICE = r"(\+\+?|~)?(model|trainer|data|instance|\w+/[\w/]+)(@[\w.]+)?(=|$)"


def _changed_recipe(frozen: Frozen, folders: Folders, start: Path) -> str | None:
    """Return a note where a live recipe has not the values that are kept of its version.

    Another choice of a group loads other files, which say nothing of the recipe.
    """
    own = [word for word in frozen.overrides if re.match(_GROUP_CHOICE, word)]
    kept = find_kept_sum(frozen.name, frozen.version, folders.recipes)
    if kept is None or own or replace(frozen, overrides=()).content_sum() == kept:
        return None
    # Hydra has one composed recipe at a time, and this one is done.
    GlobalHydra.instance().clear()
    # Where no job can be made of what was kept, that is a difference too, and not the run's end.
    with suppress(RecipeError):
        if not find_changed_keys(frozen.name, frozen.version, start):
            return None
    pinned = f"{frozen.name}@{frozen.version}"
    return (
        f"{frozen.name} is not what is kept of its version {frozen.version}: `check` names the "
        f"keys, and recipe={pinned} is that version"
    )


def _check_action(request: Request) -> None:
    job, action = request.job, request.beside.action
    is_local = isinstance(job.cluster, LocalCluster)
    if action == "run" and not is_local:
        raise RecipeError(
            f"action 'run' needs cluster=local, not cluster={job.cluster.kind}; "
            "use action=submit for a cluster"
        )
    if action == "submit" and is_local:
        raise RecipeError(
            "action 'submit' needs cluster=slurm or cluster=k8s; use action=run for this machine"
        )
    if request.beside.run.detach and (action != "run" or _sweep_number() is not None):
        raise RecipeError(
            f"run.detach true needs action=run without --multirun, not action={action}; a sweep's "
            "runs come one after the other, and a submitted run goes on by itself"
        )
    if action != "render":
        check_runnable(job, action, has_default_image=request.has_default_image)
    if action == "submit" and not request.beside.plan.force:
        check_fit(job)
    if action == "run":
        from launcher.machine import check_machine, read_machine

        if not request.beside.oversubscribe:
            check_machine(job, read_machine())
        check_inputs(job)
        check_trainer_installed(job)


def _check_asked(request: Request, config: DictConfig, choice: Choice, start: Path) -> None:
    """Refuse what a file may not ask for: rendering runs nothing of it, and writes nowhere else."""
    action, folder = request.beside.action, request.beside.run.dir
    given = "\n".join(choice.arguments)
    if folder is not None and not re.search(r"^\+{0,2}run(\.dir)?=", given, re.MULTILINE):
        written = dict(OmegaConf.to_container(config.run, resolve=False))["dir"]  # type: ignore[arg-type]
        if any(foreign_resolvers(written)) or not lies_below(folder, start):
            raise RecipeError(
                f"run.dir {written!r} stands in a file; allowed there: a folder below the current "
                "one, without the machine's variables; any other on the command line, as "
                "run.dir=FOLDER"
            )
    if action != "render" and not re.search(r"^\+{0,2}action=", given, re.MULTILINE):
        raise RecipeError(
            f"action {action!r} stands in a file; allowed: on the command line, as action={action}"
        )


def _sweep_number() -> int | None:
    """Return this job's number in a sweep, None outside of one."""
    hydra = HydraConfig.get()
    return int(hydra.job.num) if hydra.mode == RunMode.MULTIRUN else None


def _given_dir(given: str | None, sweep_number: int | None) -> str | None:
    if sweep_number is None:
        return given
    # The jobs of a sweep share one command line, and may not share a folder.
    return f"{given}/{sweep_number}" if given else str(HydraConfig.get().runtime.output_dir)


def _print_written(request: Request, run_dir: Path, files: dict[str, str]) -> None:
    job, recipe = request.job, request.job.recipe
    sys.stdout.write(f"{recipe.name} version {recipe.version}, digest {job.digest()[:12]}\n")
    for name in files:
        sys.stdout.write(f"  {run_dir / name}\n")
    sys.stdout.flush()
    action, is_default = request.beside.action, request.has_default_image
    for note in printed_notes(job, action, has_default_image=is_default):
        sys.stderr.write(f"note: {note}\n")
    for reason in misfits(job):
        sys.stderr.write(f"note: {reason}\n")

"""The command `plan`: what a job would take, as a screen of text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.commands.command_line import ordered_arguments
from launcher.composition.choice import nearest
from launcher.composition.compose import resolve_request
from launcher.composition.instances import check_instance
from launcher.composition.resolve import Request
from launcher.errors import RecipeError
from launcher.paths import find_folders
from launcher.plan.devices import TABLE, known_instances, read_device
from launcher.plan.plan import make_plan
from launcher.plan.text import plan_json, plan_text, script_json, script_text

_OPTIONS = ("--explain", "--json")
_RECIPE = "recipe="


def print_plan(arguments: Sequence[str], start: Path) -> int:
    """Plan the job that the arguments name, seen from the folder `start`; return the exit status.

    Raises RecipeError where the arguments or the job are wrong, or nothing is known of its devices.
    """
    options = [each for each in arguments if each in _OPTIONS]
    request = _read_request([each for each in arguments if each not in _OPTIONS], start)
    job = request.job
    device = read_device(job.instance)
    if device is None and job.instance.accelerator != "cpu":
        raise RecipeError(
            f"instance.type {job.instance.type!r} has no devices in {TABLE}; "
            f"{nearest(job.instance.type, known_instances())}"
        )
    if (training := job.training) is None:
        text = script_json(job) if "--json" in options else script_text(job, device)
    else:
        plan = make_plan(training, device, request.beside.plan.mfu)
        write = plan_json if "--json" in options else plan_text
        text = write(plan, is_explained="--explain" in options)
    sys.stdout.write(text)
    return 0


def _read_request(arguments: Sequence[str], start: Path) -> Request:
    folders = find_folders(start)
    ordered = ordered_arguments(arguments, folders.recipes)
    if ordered and ordered[0].startswith("-"):
        raise RecipeError(
            f"plan has no option {ordered[0]!r}; {nearest(ordered[0], [*_OPTIONS, '--help'])}"
        )
    named = [each for each in ordered if each.startswith(_RECIPE)]
    if not named:
        raise RecipeError("plan needs recipe=NAME; `list` shows them")
    recipe = named[0].removeprefix(_RECIPE)
    overrides = [each for each in ordered if each is not named[0]]
    request = resolve_request(recipe, overrides, start)
    check_instance(request.job.instance, folders.conf)
    return request

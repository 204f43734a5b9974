"""The commands beside `recipe=`: on recipes, and on runs that have been started.

Each imports what it needs when it is run: Hydra takes longer than a help text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from launcher.errors import RecipeError
from launcher.paths import find_folders

_PRINTERS = {
    "list": "launcher.commands.listing:print_list",
    "explain": "launcher.commands.recipes.explain:print_explanation",
    "diff": "launcher.commands.recipes.diff:print_difference",
    "init": "launcher.commands.recipes.init:print_init",
    "check": "launcher.commands.recipes.versions:print_check",
    "freeze": "launcher.commands.recipes.versions:print_frozen",
    "history": "launcher.commands.recipes.versions:print_history",
    "plan": "launcher.commands.recipes.plan:print_plan",
    "runs": "launcher.commands.status:print_runs",
    "logs": "launcher.commands.logs:print_logs",
    "continue": "launcher.commands.going_on:continue_run",
    "branch": "launcher.commands.branching:branch_run",
    "scale": "launcher.commands.scale:scale_run",
}
"""The function of each command; it takes the command's arguments and the folder it runs in."""
_ON_ONE_RUN = {
    "status": "launcher.commands.status:print_status",
    "attach": "launcher.commands.attach:attach",
    "cancel": "launcher.commands.cancel:print_cancel",
    "clean": "launcher.commands.clean:print_clean",
}
"""Those whose only argument is a run."""


def run_command(command: str, arguments: Sequence[str], start: Path) -> int:
    """Run one command in the folder `start`. Raises RecipeError and OutsideError."""
    if name := _PRINTERS.get(command):
        return int(resolve_name(name)(arguments, start))
    if name := _ON_ONE_RUN.get(command):
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise RecipeError(
                f"{command} takes one run, its folder or its name below ./runs; `runs` shows them"
            )
        return int(resolve_name(name)(arguments[0], start))
    if command == "show":
        _print_recipe(arguments, start)
    elif command == "schema":
        from launcher.commands.schema import recipe_schema_text

        _expect(arguments, 0, "schema")
        sys.stdout.write(recipe_schema_text())
    elif command == "completion":
        from launcher.commands.completion import SHELLS, completion_text

        if len(arguments) != 1:
            raise RecipeError(f"completion takes the name of a shell; allowed: {', '.join(SHELLS)}")
        sys.stdout.write(completion_text(arguments[0]))
    else:
        _print_report(arguments, start)
    return 0


def _print_report(arguments: Sequence[str], start: Path) -> None:
    """Make a run's page again and print its path, or print what it tells as JSON."""
    from launcher.commands.sight import find_run
    from launcher.report import read_report, write_report

    words = [word for word in arguments if word != "--json"]
    if unknown := [word for word in words if word.startswith("-")]:
        raise RecipeError(f"report has no option {unknown[0]!r}; allowed: --json")
    _expect(words, 1, "report")
    folder = find_run(words[0], start).path
    is_json = len(words) < len(arguments)
    sys.stdout.write(read_report(folder).to_json() if is_json else f"{write_report(folder)}\n")


def _expect(arguments: Sequence[str], number: int, command: str) -> None:
    if len(arguments) != number:
        words = "no argument" if number == 0 else "one argument"
        raise RecipeError(f"{command} takes {words}, not {len(arguments)}; see {command} --help")


def _print_recipe(arguments: Sequence[str], start: Path) -> None:
    from launcher.commands.command_line import ordered_arguments

    if not arguments or arguments[0].startswith("-"):
        raise RecipeError("show needs a recipe's name first; `list` shows them")
    name, overrides = arguments[0].removeprefix("recipe="), arguments[1:]
    ordered = ordered_arguments(overrides, find_folders(start).recipes)
    if ordered and ordered[0].startswith("-"):
        raise RecipeError(f"show takes a name and overrides, and no option {ordered[0]!r}")
    import yaml

    from launcher.composition.compose import resolve

    content = resolve(name, overrides, start).model_dump(mode="json", by_alias=True)
    yaml.safe_dump(content, sys.stdout, sort_keys=False, allow_unicode=True)

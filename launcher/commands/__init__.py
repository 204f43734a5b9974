"""The commands beside `recipe=`: on recipes, and on runs that have been started.

Each imports what it needs when it is run: Hydra takes longer than a help text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import RecipeError
from launcher.paths import find_folders

_ON_VERSIONS = ("check", "freeze", "history")
_ON_RUNS = ("runs", "status", "logs", "attach", "cancel", "clean", "continue", "branch", "scale")


def run_command(command: str, arguments: Sequence[str], start: Path) -> int:
    """Run one command in the folder `start`. Raises RecipeError and OutsideError."""
    if command == "list":
        from launcher.commands.listing import print_list

        return print_list(arguments, start)
    if command == "explain":
        from launcher.commands.recipes.explain import print_explanation

        return print_explanation(arguments, start)
    if command == "diff":
        from launcher.commands.recipes.diff import print_difference

        return print_difference(arguments, start)
    if command == "init":
        from launcher.commands.recipes.init import print_init

        return print_init(arguments, start)
    if command in _ON_VERSIONS:
        from launcher.commands.recipes import versions

        prints = {
            "check": versions.print_check,
            "freeze": versions.print_frozen,
            "history": versions.print_history,
        }
        return prints[command](arguments, start)
    if command == "plan":
        from launcher.commands.recipes.plan import print_plan

        return print_plan(arguments, start)
    if command in _ON_RUNS:
        return _run_on_run(command, arguments, start)
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


def _run_on_run(command: str, arguments: Sequence[str], start: Path) -> int:
    if command == "runs":
        from launcher.commands.status import print_runs

        return print_runs(arguments, start)
    if command == "continue":
        from launcher.commands.going_on import continue_run

        return continue_run(arguments, start)
    if command == "branch":
        from launcher.commands.branching import branch_run

        return branch_run(arguments, start)
    if command == "scale":
        from launcher.commands.scale import scale_run

        return scale_run(arguments, start)
    if command == "logs":
        from launcher.commands.logs import parse_log_options, print_logs

        return print_logs(parse_log_options(arguments), start)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise RecipeError(
            f"{command} takes one run, its folder or its name below ./runs; `runs` shows them"
        )
    if command == "status":
        from launcher.commands.status import print_status

        return print_status(arguments[0], start)
    if command == "attach":
        from launcher.commands.attach import attach

        return attach(arguments[0], start)
    if command == "cancel":
        from launcher.commands.cancel import print_cancel

        return print_cancel(arguments[0], start)
    from launcher.commands.clean import print_clean

    return print_clean(arguments[0], start)


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

"""The command line: `python -m launcher recipe=NAME [key=value ...]`.

Exit status: 0 done, 1 something outside refused or failed, 2 the recipe or the
command line is wrong (one message, nothing written).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launcher.choice import choose_recipe
from launcher.errors import LauncherError, RecipeError
from launcher.job.secrets import override_secrets
from launcher.paths import find_folders, shipped_folder

USAGE = """\
usage: python -m launcher recipe=NAME [cluster=local|slurm|k8s] [action=render|run|submit] [KEY=VALUE ...]
       python -m launcher list                          recipes that can be chosen
       python -m launcher show NAME [KEY=VALUE ...]     a recipe, resolved
       python -m launcher schema                        JSON Schema of a recipe, for editors
       python -m launcher report FOLDER                 make a run's report again

  NAME is a recipe's name or the path of a .yaml file. KEY=VALUE overrides a key, +KEY=VALUE adds
  one to an open mapping such as env, GROUP=OPTION chooses another model, trainer, data or instance.

  --cfg job          print the config instead        --info defaults-tree   show what includes what
  --multirun, -m     a job for each of KEY=A,B       --hydra-help           all of Hydra's options
"""  # noqa: E501
_COMMANDS = ("list", "show", "schema", "report")
FIRST_SIGNAL_STATUS = 128
# These print something of Hydra's own and choose no recipe.
_WITHOUT_RECIPE = ("--hydra-help", "--version", "--shell-completion", "-sc")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if not given or given[0] in {"-h", "--help", "help"}:
            sys.stdout.write(USAGE)
            return 0 if given else 2
        if given[0] in _COMMANDS:
            from launcher.commands import run_command

            return run_command(given[0], given[1:], Path.cwd())
        return _launch(given, Path.cwd())
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    except BrokenPipeError:
        # Whoever read our output has left; nothing more can be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _launch(given: list[str], start: Path) -> int:
    folders = find_folders(start)
    choice = choose_recipe(given, folders.recipes, start)
    if choice.recipe is None and not any(option in given for option in _WITHOUT_RECIPE):
        raise RecipeError("no recipe; name one with recipe=NAME, `list` shows them")

    if problems := list(override_secrets(given)):
        raise RecipeError("\n".join(problems))

    # Hydra is imported once the recipe is known to be there.
    import hydra
    from omegaconf import DictConfig

    from launcher.app import launch
    from launcher.compose import CONFIG_NAME, VERSION_BASE
    from launcher.hydra_errors import composing_error
    from launcher.search import add_search_path

    recipes = (*choice.folders, *folders.recipes)
    add_search_path(folders.conf, recipes)
    statuses = [0]
    refusals: list[LauncherError] = []
    is_composing = True

    @hydra.main(
        config_path=str(shipped_folder() / "conf"),
        config_name=CONFIG_NAME,
        version_base=VERSION_BASE,
    )
    def run(config: DictConfig) -> None:
        nonlocal is_composing
        is_composing = False
        # Hydra would print the whole command line beside an error raised here, secrets and all.
        try:
            # A person who stopped one job of a sweep does not want the next.
            if not refusals and max(statuses) < FIRST_SIGNAL_STATUS:
                statuses.append(launch(config, folders, start))
        except LauncherError as error:
            refusals.append(error)
        is_composing = True

    is_trace_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    # Makes Hydra raise its errors instead of printing them and exiting with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["launcher", *choice.arguments]
    try:
        run()
    except Exception as error:
        if is_trace_wanted or not is_composing:
            raise
        raise composing_error(error, recipes, choice.recipe) from error
    if refusals:
        raise refusals[0]
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())

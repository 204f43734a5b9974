"""Compose a recipe with Hydra's compose API, outside the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from launcher.composition.choice import choose_recipe
from launcher.composition.hydra_errors import composing_error, refused_search_path
from launcher.composition.resolve import request_from_config
from launcher.composition.search import add_search_path
from launcher.job import Job
from launcher.paths import find_folders, shipped_folder

CONFIG_NAME = "launcher"
VERSION_BASE = "1.3"


def compose_recipe(
    recipe: str, overrides: Sequence[str] = (), start: Path | None = None
) -> tuple[DictConfig, str | None]:
    """Return the config of a recipe, given by name or path, with overrides.

    Beside it is the name that the recipe has to have, None for one given by path. `start` is the
    folder from which a team's own folders are looked for, the current one unless told. Raises
    RecipeError. Not safe for several threads: Hydra keeps its state in the process.
    """
    from hydra import compose, initialize_config_dir

    start = start or Path.cwd()
    folders = find_folders(start)
    choice = choose_recipe([f"recipe={recipe}", *overrides], folders.recipes, start)
    add_search_path(folders.conf, (*choice.folders, *folders.recipes))
    conf = str(shipped_folder() / "conf")
    try:
        with refused_search_path(), initialize_config_dir(conf, version_base=VERSION_BASE):
            config = compose(CONFIG_NAME, list(choice.arguments))
    except Exception as error:
        raise composing_error(error, (*choice.folders, *folders.recipes), recipe) from error
    return config, None if choice.by_path else choice.recipe


def resolve(recipe: str, overrides: Sequence[str] = (), start: Path | None = None) -> Job:
    """Return the job of a recipe with overrides; raises RecipeError."""
    config, found_by = compose_recipe(recipe, overrides, start)
    return request_from_config(config, found_by=found_by).job

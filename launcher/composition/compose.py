"""Compose a recipe with Hydra's compose API, outside the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from launcher.composition.choice import Choice, choose_recipe
from launcher.composition.hydra_errors import composing_error, refused_search_path
from launcher.composition.layers import read_layers
from launcher.composition.resolve import request_from_config
from launcher.composition.search import add_search_path
from launcher.job import Job
from launcher.paths import find_folders, shipped_folder
from launcher.provenance.fold import Fold, fold
from launcher.provenance.named import add_origins

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
    config, choice = compose_choice(recipe, overrides, start)
    return config, None if choice.by_path else choice.recipe


def compose_choice(
    recipe: str, overrides: Sequence[str] = (), start: Path | None = None
) -> tuple[DictConfig, Choice]:
    """Return the same config, and what its recipe was found to be; raises likewise."""
    from hydra import compose

    with _initialized(recipe, overrides, start or Path.cwd()) as choice:
        config = compose(CONFIG_NAME, list(choice.arguments))
    return config, choice


def fold_recipe(recipe: str, overrides: Sequence[str] = (), start: Path | None = None) -> Fold:
    """Return who has set what in the config that `compose_recipe` returns; raises likewise."""
    start = start or Path.cwd()
    with _initialized(recipe, overrides, start) as choice:
        return fold(read_layers(CONFIG_NAME, choice.arguments, start))


def resolve(recipe: str, overrides: Sequence[str] = (), start: Path | None = None) -> Job:
    """Return the job of a recipe with overrides; raises RecipeError."""
    config, found_by = compose_recipe(recipe, overrides, start)

    def tell_origins(problems: Sequence[str]) -> list[str]:
        return add_origins(problems, fold_recipe(recipe, overrides, start))

    return request_from_config(config, found_by=found_by, tell_origins=tell_origins).job


@contextmanager
def _initialized(recipe: str, overrides: Sequence[str], start: Path) -> Iterator[Choice]:
    """Have Hydra find what a recipe needs; what it raises within becomes an error of ours."""
    from hydra import initialize_config_dir

    folders = find_folders(start)
    choice = choose_recipe([f"recipe={recipe}", *overrides], folders.recipes, start)
    recipes = (*choice.folders, *folders.recipes)
    add_search_path(folders.conf, recipes, choice.frozen)
    conf = str(shipped_folder() / "conf")
    try:
        with refused_search_path(), initialize_config_dir(conf, version_base=VERSION_BASE):
            yield choice
    except Exception as error:
        raise composing_error(error, recipes, recipe) from error

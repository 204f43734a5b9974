"""Compose a recipe with Hydra's compose API, outside the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from launcher.composition.choice import Choice, choose_recipe
from launcher.composition.frozen import File
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
_OUR_WORDS = {"callbacks", "output_subdir", "run", "sweep"}
"""What conf/launcher.yaml says to Hydra: where its own files would go, and those of a sweep."""


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


def call_once(
    arguments: Sequence[str], loaded: Mapping[str, File], function: Callable[[DictConfig], None]
) -> bool:
    """Compose one job and call `function` with it, as Hydra's own entry does.

    Hydra's composes twice, the first time to see whether a sweep is asked for. Returns False, with
    nothing called, where a file has a word for Hydra, which its own entry has to hear. `loaded` is
    what is recorded of the files. What Hydra raises is raised.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import open_dict

    conf = str(shipped_folder() / "conf")
    with initialize_config_dir(conf, job_name="launcher", version_base=VERSION_BASE):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        # Not by Hydra's `compose`, whose messages are for programs.
        words = [*arguments, "hydra.mode=RUN"]
        config = hydra.compose_config(CONFIG_NAME, words, RunMode.RUN)
        if any(_speaks_to_hydra(name, file) for name, file in loaded.items()):
            return False
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        function(config)
    return True


def _speaks_to_hydra(name: str, file: File) -> bool:
    words = file.content.get("hydra", {})
    is_ours = name == CONFIG_NAME and isinstance(words, Mapping) and words.keys() <= _OUR_WORDS
    return bool(words and not is_ours) or (file.package or "").startswith("hydra")


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

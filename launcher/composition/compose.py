"""Compose a recipe with Hydra's compose API, outside the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.composition.choice import Choice, choose_recipe
from launcher.composition.frozen import ROOT, File, Frozen
from launcher.composition.hydra_errors import composing_error, refused_search_path
from launcher.composition.layers import read_layers
from launcher.composition.resolve import Request, request_from_config
from launcher.composition.search import Loaded, add_search_path
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.paths import find_folders, shipped_folder
from launcher.provenance.fold import Fold, fold
from launcher.provenance.named import add_origins
from launcher.versions.digest import chosen_cluster, recipe_digest, recipe_values

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


def find_changed(frozen: Frozen, digest: str, start: Path) -> str | None:
    """Return why what a frozen recipe resolves to has another digest, None where it has this one.

    What its file says of itself proves nothing.
    """
    from hydra import compose

    choice = Choice((), (), frozen.name, frozen=frozen)
    try:
        with Loaded.record() as loaded, _found(choice, start):
            config = compose(CONFIG_NAME, [f"recipe={ROOT}", *frozen.overrides])
        content: Any = OmegaConf.to_container(config, resolve=False)
        found = recipe_digest(recipe_values(content, chosen_cluster(loaded)))
    except RecipeError as error:
        return str(error)
    if found == digest:
        return None
    return (
        f"{frozen.path} resolves to the digest {found[:12]}, and the lock names {digest[:12]}; get "
        "the file back from your repository"
    )


def fold_recipe(recipe: str, overrides: Sequence[str] = (), start: Path | None = None) -> Fold:
    """Return who has set what in the config that `compose_recipe` returns; raises likewise."""
    start = start or Path.cwd()
    with _initialized(recipe, overrides, start) as choice:
        return fold(read_layers(CONFIG_NAME, choice.arguments, start))


def resolve(recipe: str, overrides: Sequence[str] = (), start: Path | None = None) -> Job:
    """Return the job of a recipe with overrides; raises RecipeError."""
    return resolve_request(recipe, overrides, start).job


def resolve_request(
    recipe: str, overrides: Sequence[str] = (), start: Path | None = None
) -> Request:
    """Return the job with what is asked for beside it; raises RecipeError."""
    config, found_by = compose_recipe(recipe, overrides, start)

    def tell_origins(problems: Sequence[str]) -> list[str]:
        return add_origins(problems, fold_recipe(recipe, overrides, start))

    return request_from_config(config, found_by=found_by, tell_origins=tell_origins)


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
    """Choose a recipe, and have Hydra find what it needs."""
    choice = choose_recipe([f"recipe={recipe}", *overrides], find_folders(start).recipes, start)
    check_kept(choice, start)
    with _found(choice, start):
        yield choice


def check_kept(choice: Choice, start: Path) -> None:
    """Raise RecipeError where a kept version's file is no more what the lock names."""
    if choice.frozen is None or choice.locked is None:
        return
    if problem := find_changed(choice.frozen, choice.locked, start):
        raise RecipeError(f"recipe {choice.recipe!r} cannot be used: {problem}")


@contextmanager
def _found(choice: Choice, start: Path) -> Iterator[None]:
    """Have Hydra find what a recipe needs; what it raises within becomes an error of ours."""
    from hydra import initialize_config_dir

    folders = find_folders(start)
    recipes = (*choice.folders, *folders.recipes)
    add_search_path(folders.conf, recipes, choice.frozen)
    conf = str(shipped_folder() / "conf")
    try:
        with refused_search_path(), initialize_config_dir(conf, version_base=VERSION_BASE):
            yield
    except Exception as error:
        raise composing_error(error, recipes, choice.recipe) from error

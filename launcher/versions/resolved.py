"""What a recipe is composed of now, and the number of its version."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.composition.compose import compose_recipe
from launcher.composition.frozen import ROOT_FILE, File, Frozen
from launcher.composition.search import Loaded
from launcher.errors import RecipeError
from launcher.versions.digest import BESIDE, recipe_digest, recipe_values
from resilience.whole_files import replace_text

_CLUSTER_KEY = re.compile(r"override\s+/cluster(@\S+)?")

_VERSION_LINE = re.compile(
    r"^(recipe:[^\S\n]*\n(?:[ \t]+.*\n|[ \t]*\n)*?[ \t]+version:[ \t]*)\d+", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A recipe as it is composed now."""

    frozen: Frozen
    values: Mapping[str, Any]


def resolve_recipe(
    recipe: str, overrides: Sequence[str] = (), start: Path | None = None
) -> Resolved:
    """Return what a recipe, given by name, version or path, says with overrides, and its files.

    What says how and where it is run is left out. Raises RecipeError.
    """
    kept = own_overrides(overrides)
    with Loaded.record() as loaded:
        config, _ = compose_recipe(recipe, kept, start)
    return freeze_config(config, loaded, kept)


def own_overrides(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides that say something of the recipe."""
    return tuple(word for word in overrides if not _is_beside(word))


def freeze_config(
    config: DictConfig,
    loaded: Mapping[str, File],
    overrides: tuple[str, ...],
    chosen: str | None = None,
) -> Resolved:
    """Return what a composed config says, and the files that were loaded for it.

    `chosen` is the recipe's name while it was composed; without it the recipe that was loaded
    first. Raises RecipeError.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    content = {str(key): value for key, value in raw.items()}
    info = content.get("recipe")
    if not isinstance(info, dict) or not isinstance(info.get("version"), int):
        raise RecipeError("the recipe has no recipe.version; allowed: a whole number")
    files = dict(_own_files(loaded, chosen))
    values = recipe_values(content, _chosen_cluster(files))
    frozen = Frozen(
        name=str(info.get("name")),
        version=info["version"],
        digest=recipe_digest(values),
        files=files,
        overrides=overrides,
    )
    return Resolved(frozen=frozen, values=values)


def _is_beside(override: str) -> bool:
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0] in BESIDE


def _own_files(loaded: Mapping[str, File], chosen: str | None) -> Iterator[tuple[str, File]]:
    """Yield what is the recipe's: the launcher's own root is live, and so are clusters."""
    # Hydra loads what is chosen before what that includes.
    root = f"recipe/{chosen}" if chosen else next(n for n in loaded if n.startswith("recipe/"))
    for name, file in loaded.items():
        if name == root:
            yield ROOT_FILE, file
        elif "/" in name and name.partition("/")[0] not in BESIDE:
            yield name, file


def _chosen_cluster(files: Mapping[str, File]) -> str | None:
    """Return the cluster that the recipe or one that it includes chooses; the outermost wins."""
    for name, file in files.items():
        entries = file.content.get("defaults") or () if name.startswith("recipe/") else ()
        for entry in entries:
            for key, option in entry.items() if isinstance(entry, dict) else ():
                if _CLUSTER_KEY.fullmatch(str(key)):
                    return str(option)
    return None


def with_number(resolved: Resolved, number: int) -> Resolved:
    """Return what a recipe will be when its file has another version's number."""
    frozen = resolved.frozen
    root = frozen.files[ROOT_FILE]
    content = {**root.content, "recipe": {**root.content["recipe"], "version": number}}
    values = {**resolved.values, "recipe": {**resolved.values["recipe"], "version": number}}
    files = {**frozen.files, ROOT_FILE: replace(root, content=content)}
    digest = recipe_digest(values)
    raised = replace(frozen, version=number, digest=digest, files=files)
    return Resolved(frozen=raised, values=values)


def raise_number(path: Path, number: int) -> None:
    """Write another version's number into a recipe's file, and change nothing else in it.

    Raises RecipeError where the file does not set it itself.
    """
    text = path.read_text("utf-8")
    new, count = _VERSION_LINE.subn(rf"\g<1>{number}", text)
    if count != 1:
        raise RecipeError(
            f"{path} does not set recipe.version in a line of its own; write it there"
        )
    replace_text(path, new, str(os.getpid()))

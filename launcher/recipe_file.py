"""Read one recipe's file, and make what it includes mean the same at every depth.

Hydra reads a bare name relative to the including file's folder, so that a name which is right in
a recipe that was chosen is wrong in one that was included. Here a bare name is a recipe's name,
as on the command line; where no recipe has it, it is that of a neighbour in the same folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.choice import list_recipes, nearest
from launcher.errors import RecipeError
from launcher.yaml_size import read_yaml_text

GROUP = "recipe"
PACKAGE_LINE = "# @package _global_"
_HEADER_CHARACTERS = 512
"""In so much of a file's beginning Hydra looks for the line with the package."""
# A group's key in a defaults list: [override|optional] GROUP[@PACKAGE].
_GROUP_KEY = re.compile(r"(?P<word>(override|optional)\s+)?(?P<group>[^@\s]+)(?P<package>@\S+)?")


def read_recipe(path: Path, name: str, folders: Sequence[Path]) -> tuple[str, DictConfig]:
    """Return the first characters of a recipe's file and its content.

    `name` is the recipe's below its folder, `folders` are all folders of recipes. Every recipe in
    the content's defaults list is named from the root. Raises RecipeError that names the file and
    what is wrong in it, and yaml.YAMLError with file and line.
    """
    text = read_yaml_text(path)
    try:
        content = OmegaConf.load(path)
    except OSError as error:
        # Its answer to a file that holds one text or number.
        raise RecipeError(f"{path} is no mapping of keys to values") from error
    if not isinstance(content, DictConfig):
        raise RecipeError(f"{path} is a list; allowed: a mapping of keys to values")
    if not content:
        raise RecipeError(
            f"{path} is empty; a recipe begins with {PACKAGE_LINE!r}, and `schema` says what "
            "keys it has"
        )
    _check_cluster(content, path)
    header = text[:_HEADER_CHARACTERS]
    if not name.rpartition("/")[2].startswith("_"):
        _check_package(header, path)
    if "defaults" in content:
        entries = OmegaConf.to_container(content, resolve=False)["defaults"]  # type: ignore[index, call-overload]
        content["defaults"] = list(_rooted(entries or (), path, name, folders))
    return header, content


def included_recipes(content: DictConfig) -> Iterator[str]:
    """Yield the names of the recipes that a recipe as it was read includes."""
    entries = OmegaConf.to_container(content, resolve=False).get("defaults")  # type: ignore[union-attr]
    for entry in entries or ():
        if isinstance(entry, str) and entry.startswith(f"/{GROUP}/"):
            yield entry.partition("@")[0].removeprefix(f"/{GROUP}/")
        elif isinstance(entry, dict):
            for key, value in entry.items():
                if str(key).split()[-1].partition("@")[0].strip("/") == GROUP:
                    yield str(value)


def _check_package(header: str, path: Path) -> None:
    if not re.search(r"^\s*#\s*@package\s+_global_\s*$", header, re.MULTILINE):
        raise RecipeError(
            f"{path} has no line {PACKAGE_LINE!r} at its beginning, so that its keys would all lie "
            "below `recipe`; make it the first line (a part that is no recipe has a name that "
            "begins with _)"
        )


def _check_cluster(content: DictConfig, path: Path) -> None:
    """Refuse keys of a cluster, which fit one kind of it only."""
    if "cluster" not in content:
        return
    keys = OmegaConf.to_container(content, resolve=False)["cluster"]  # type: ignore[index, call-overload]
    names = ", ".join(f"cluster.{key}" for key in keys) if isinstance(keys, dict) else "cluster"
    raise RecipeError(
        f"{path} sets {names or 'cluster'}, and a recipe is for every kind of cluster; write a "
        "profile, conf/cluster/ours.yaml with `defaults: [slurm, _self_]` and these keys without "
        "`cluster`, and choose it with cluster=ours, or in the recipe's defaults as "
        "`override /cluster: ours`"
    )


def _rooted(
    entries: Any, path: Path, name: str, folders: Sequence[Path]
) -> Iterable[str | dict[str, Any]]:
    """Yield the entries of a defaults list with every recipe named from the root."""
    if not isinstance(entries, list | tuple):
        raise RecipeError(f"{path}: defaults {entries!r}: allowed: a list")
    for entry in entries:
        if isinstance(entry, str) and entry != "_self_" and not entry.startswith("/"):
            yield _rooted_name(entry, path, name, folders)
        elif isinstance(entry, dict):
            yield {_rooted_key(str(key), path, folders): value for key, value in entry.items()}
        else:
            yield entry


def _rooted_name(entry: str, path: Path, name: str, folders: Sequence[Path]) -> str:
    """Return the entry of the recipe that a bare name means; its keys lie at the top level."""
    bare, _, package = entry.partition("@")
    bare = bare.removesuffix(".yaml")
    family = name.rpartition("/")[0]
    for found in dict.fromkeys((bare, f"{family}/{bare}".removeprefix("/"))):
        if any((folder / f"{found}.yaml").is_file() for folder in folders):
            return f"/{GROUP}/{found}@{package or '_global_'}"
    raise RecipeError(f"{path} includes {bare!r}: no such recipe; {nearest(bare, _known(folders))}")


def _rooted_key(key: str, path: Path, folders: Sequence[Path]) -> str:
    """Return a group's key with the / without which Hydra looks for it among the recipes."""
    found = _GROUP_KEY.fullmatch(key.strip())
    if not found or found["group"].startswith(("/", "hydra/")) or found["group"] == GROUP:
        return key
    group = found["group"]
    if any((folder / group).is_dir() for folder in folders):
        return f"{found['word'] or ''}/{GROUP}/{group}{found['package'] or '@_global_'}"
    raise RecipeError(
        f"{path}: {key!r} in its defaults; a group is written with a / before its name, as "
        f"{found['word'] or ''}/{group}{found['package'] or ''}"
    )


def _known(folders: Sequence[Path]) -> list[str]:
    return list_recipes(folders)

"""Read one recipe's file, and make what it includes mean the same at every depth.

Hydra reads a bare name relative to the including file's folder, so that a name which is right in
a recipe that was chosen is wrong in one that was included. Here a bare name is a recipe's name,
as on the command line; where no recipe has it, it is that of a neighbour in the same folder.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from launcher.composition.aliases import find_renamed
from launcher.composition.choice import list_recipes, nearest
from launcher.composition.yaml_size import keep_texts, naming_file, read_yaml_text
from launcher.errors import RecipeError
from launcher.hydra_words import check_hydra_words
from launcher.secrets import check_secrets

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
    what is wrong in it, or in what it includes.
    """
    header, content = parse_recipe(path, name, folders)
    _check_chosen_once(content, path, folders)
    return header, content


def parse_recipe(path: Path, name: str, folders: Sequence[Path]) -> tuple[str, DictConfig]:
    """Return the same without a look at what the recipe includes."""
    text = read_yaml_text(path)
    try:
        with naming_file(path):
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
    keep_texts(content, text)
    check_secrets(OmegaConf.to_container(content, resolve=False), path, text)
    check_hydra_words(content, path, text)
    _check_cluster(content, path)
    header = text[:_HEADER_CHARACTERS]
    if not name.rpartition("/")[2].startswith("_"):
        _check_package(header, path)
    if "defaults" in content:
        entries = OmegaConf.to_container(content, resolve=False)["defaults"]  # type: ignore[index, call-overload]
        content["defaults"] = list(_rooted(entries or [], path, name, folders))
    return header, content


def find_recipe(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that a recipe's name means, None where there is none; the first folder wins.

    A name leads out of no folder.
    """
    if ".." in name.split("/"):
        return None
    return next((p for f in folders if (p := f / f"{name}.yaml").is_file()), None)


def included_recipes(content: DictConfig) -> Iterator[str]:
    """Yield the names of the recipes that a recipe as it was read includes."""
    entries = OmegaConf.to_container(content, resolve=False).get("defaults")  # type: ignore[union-attr]
    for entry in entries or ():
        if isinstance(entry, str) and entry.startswith(f"/{GROUP}/"):
            yield entry.partition("@")[0].removeprefix(f"/{GROUP}/")


def _check_chosen_once(content: DictConfig, path: Path, folders: Sequence[Path]) -> None:
    """Refuse a group that an included recipe has chosen, where no `override` says so.

    Hydra would take the group's values once more, over what the included recipe has set.
    """
    own = _chosen_groups(content)
    for name in included_recipes(content) if own else ():
        if again := own & _groups_below(name, folders, set()):
            group = min(again)
            raise RecipeError(
                f"{path} chooses {group}, which {name!r} that it includes has chosen; write "
                f"`override {group}: NAME`"
            )


def _groups_below(name: str, folders: Sequence[Path], seen: set[str]) -> set[str]:
    """Return the groups that a recipe and all that it includes choose."""
    path = find_recipe(name, folders)
    if path is None or name in seen:
        return set()
    seen.add(name)
    content = parse_recipe(path, name, folders)[1]
    found = _chosen_groups(content)
    return found.union(*(_groups_below(each, folders, seen) for each in included_recipes(content)))


def _chosen_groups(content: DictConfig) -> set[str]:
    entries = OmegaConf.to_container(content, resolve=False).get("defaults")  # type: ignore[union-attr]
    keys = (str(key) for entry in entries or () if isinstance(entry, dict) for key in entry)
    return {key for key in keys if re.fullmatch(r"/[\w/]+", key)}


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
) -> Iterator[str | dict[str, Any]]:
    """Yield the entries of a defaults list with every recipe named from the root."""
    if not isinstance(entries, list):
        raise RecipeError(f"{path}: defaults {entries!r}: allowed: a list")
    for entry in entries:
        if isinstance(entry, str):
            yield _rooted_name(entry, path, name, folders)
        elif isinstance(entry, dict) and entry:
            for key, value in entry.items():
                yield from _rooted_group(str(key), value, path, name, folders)
        else:
            raise RecipeError(
                f"{path}: {entry!r} in its defaults; allowed: a recipe's name, or /GROUP: NAME"
            )


def _rooted_name(entry: str, path: Path, name: str, folders: Sequence[Path]) -> str:
    """Return the entry of the recipe that a name means; its keys lie at the top level."""
    given, _, package = entry.partition("@")
    bare = given.removesuffix(".yaml").removeprefix(f"/{GROUP}/")
    if found := _find(bare.removeprefix("/"), name, folders):
        return f"/{GROUP}/{found}@{package or '_global_'}"
    # Anything else from the root is a file of a group.
    if entry == "_self_" or bare.startswith("/"):
        return entry
    near = nearest(bare, list_recipes(folders))
    raise RecipeError(f"{path} includes {given!r}: no such recipe; {near}")


def _find(bare: str, name: str, folders: Sequence[Path]) -> str | None:
    """Return the recipe that has this name, or this name beside the recipe `name`, or had it."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), bare))
    for each in (bare, beside):
        if find_recipe(each, folders):
            return each
    renamed = (find_renamed(each, folders) for each in (bare, beside))
    return next((each for each in renamed if each), None)


def _rooted_group(
    key: str, value: Any, path: Path, name: str, folders: Sequence[Path]
) -> Iterator[str | dict[str, Any]]:
    """Yield a group's entry as it is, or for a family of recipes an entry for each name."""
    found = _GROUP_KEY.fullmatch(key.strip())
    if not found:
        yield {key: value}
        return
    word, group, package = found["word"] or "", found["group"], found["package"] or ""
    family = group.removeprefix("/").removeprefix(GROUP).removeprefix("/")
    chosen = value if isinstance(value, list) else [value]
    names = [f"{family}/{each}".removeprefix("/") for each in chosen]
    is_recipe = group.strip("/") == GROUP or group.startswith(f"/{GROUP}/")
    if not word and (is_recipe or any(_find(each, name, folders) for each in names)):
        yield from (_rooted_name(f"{each}{package}", path, name, folders) for each in names)
    elif group.startswith("/"):
        yield {key: value}
    else:
        raise RecipeError(
            f"{path}: {key!r} in its defaults; a group is written with a / before its name, as "
            f"{word}/{group}{package}"
        )

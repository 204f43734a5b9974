"""What a recipe is composed of now, and the number of its version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from launcher.composition.compose import compose_choice
from launcher.composition.frozen import BESIDE, ROOT_FILE, File, Frozen, says_how_it_is_run
from launcher.composition.resolve import missing_keys, request_from_config
from launcher.composition.search import Loaded
from launcher.errors import RecipeError
from launcher.versions.digest import chosen_cluster, recipe_digest, recipe_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A recipe as it is composed now."""

    frozen: Frozen
    values: Mapping[str, Any]
    content: Mapping[str, Any]
    """As it was composed, with its references as they are written."""

    def written_values(self) -> dict[str, Any]:
        """Return its values, with the texts that the digest leaves out; raises RecipeError."""
        return recipe_values(self.content, self.values.get("cluster"), is_written=True)


def resolve_recipe(
    recipe: str, overrides: Sequence[str] = (), start: Path | None = None
) -> Resolved:
    """Return what a recipe, given by name, version or path, says with overrides, and its files.

    What says how and where it is run is left out. Raises RecipeError, also where no job can be made
    of it; one that leaves values to whoever runs it may break rules that join them.
    """
    paths = [word for word in overrides if word.lstrip("+").startswith("hydra.searchpath=")]
    with Loaded.record() as loaded:
        config, choice = compose_choice(recipe, [*paths, *own_overrides(overrides)], start)
    # What was kept is as it was, whatever the rules are by now.
    if choice.frozen is None and not any(missing_keys(OmegaConf.to_container(config))):
        request_from_config(config)
    words = own_overrides(word for word in choice.arguments if not word.startswith("recipe="))
    (chosen,) = (word for word in choice.arguments if word.startswith("recipe="))
    return freeze_config(config, loaded, words, chosen.removeprefix("recipe="))


def own_overrides(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides that say something of the recipe."""
    return tuple(word for word in overrides if not says_how_it_is_run(word))


def freeze_config(
    config: DictConfig, loaded: Mapping[str, File], overrides: tuple[str, ...], chosen: str
) -> Resolved:
    """Return what a composed config says, and the files that were loaded for it.

    `chosen` is the recipe's name while it was composed. Raises RecipeError.
    """
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    content = {str(key): value for key, value in raw.items()}
    info = content.get("recipe")
    if not isinstance(info, dict) or not isinstance(info.get("version"), int):
        raise RecipeError("the recipe has no recipe.version; allowed: a whole number")
    files = dict(_own_files(loaded, chosen))
    values = recipe_values(content, chosen_cluster(files))
    frozen = Frozen(
        name=str(info.get("name")),
        version=info["version"],
        digest=recipe_digest(values),
        files=files,
        overrides=overrides,
    )
    return Resolved(frozen=frozen, values=values, content=content)


def _own_files(loaded: Mapping[str, File], chosen: str) -> Iterator[tuple[str, File]]:
    """Yield what is the recipe's: the launcher's own root is live, and so are clusters."""
    for name, file in loaded.items():
        if name == f"recipe/{chosen}":
            yield ROOT_FILE, file
        elif "/" in name and name.partition("/")[0] not in BESIDE:
            yield name, file


def with_number(resolved: Resolved, number: int) -> Resolved:
    """Return what a recipe will be when its file has another version's number."""
    frozen = resolved.frozen
    root = frozen.files[ROOT_FILE]
    content = {**root.content, "recipe": {**root.content["recipe"], "version": number}}
    values = {**resolved.values, "recipe": {**resolved.values["recipe"], "version": number}}
    files = {**frozen.files, ROOT_FILE: replace(root, content=content)}
    digest = recipe_digest(values)
    raised = replace(frozen, version=number, digest=digest, files=files)
    return replace(resolved, frozen=raised, values=values)


def raised_text(path: Path, number: int) -> str:
    """Return a recipe's text with another version's number, and nothing else changed in it.

    Raises RecipeError where the file does not set it itself, in digits.
    """
    text = path.read_bytes().decode("utf-8")
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(bom)
    node = _value_of(_value_of(yaml.compose(text, yaml.SafeLoader), "recipe"), "version")
    if not isinstance(node, yaml.ScalarNode):
        raise RecipeError(f"{path} does not set recipe.version itself; write it there")
    begin, end = node.start_mark.index, node.end_mark.index
    if not re.fullmatch(r"[1-9]\d*", text[begin:end]):
        raise RecipeError(
            f"recipe.version {text[begin:end]!r} in {path}: allowed: a whole number in digits"
        )
    return f"{bom}{text[:begin]}{number}{text[end:]}"


def _value_of(node: object, key: str) -> object:
    """Return the node of a key's value in a YAML mapping, None where there is none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)

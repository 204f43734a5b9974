"""Turn what Hydra, OmegaConf and PyYAML raise into messages of one kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from launcher.choice import nearest
from launcher.errors import LauncherError, RecipeError

# Sections whose keys are the person's own.
OPEN_MAPPINGS = (
    "env.",
    "cluster.secrets.",
    "cluster.labels.",
    "cluster.annotations.",
    "cluster.node_selector.",
    "cluster.affinity.required.",
    "cluster.extra_options.",
)


def composing_error(error: Exception, recipes: Sequence[Path], recipe: str | None) -> Exception:
    """Return what to raise for an error that came up while Hydra composed a config.

    Nothing of ours runs until then but the search for files, so what comes up is
    the input's fault. `recipes` are the folders in which an inclusion is looked
    for when a recipe includes itself.
    """
    if isinstance(error, LauncherError):
        return error
    if isinstance(error, RecursionError):
        chain = _inclusion_cycle(recipe or "", recipes)
        return RecipeError(f"recipe includes itself: {' -> '.join(chain) or recipe}")
    if isinstance(error, yaml.YAMLError):
        return RecipeError(_yaml_message(error))
    if isinstance(error, MissingConfigException):
        return RecipeError(_missing_message(error))
    return RecipeError(_hydra_message(error))


def _yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"broken YAML: {error}"
    problem = getattr(error, "problem", None) or "broken YAML"
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _missing_message(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = [option for option in error.options or () if not option.startswith("_")]
    if not group:
        return str(error).partition("\n")[0]
    close = nearest(name, options)
    everything = "" if close.startswith("allowed") else f"; allowed: {', '.join(options)}"
    return f"no {group} {name!r}; {close}{everything}"


def _hydra_message(error: Exception) -> str:
    cause = error.__cause__
    text = str(error).strip()
    if found := re.match(r"Could not override '([^']+)'", text):
        return _no_key_message(found[1], cause)
    if found := re.match(r"Error merging override (.*)", text, re.DOTALL):
        return f"override {found[1]!r}: {_first_line(cause or error)}"
    if found := re.match(r"Multiple values for (\S+)\. .*'override \S+: (\S+)'", text):
        group, option = found[1], found[2]
        return f"{group} is chosen twice; write {group}={option} without a +, or override it"
    if not text and cause is not None:
        return _first_line(cause)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _no_key_message(key: str, cause: BaseException | None) -> str:
    parent = getattr(cause, "parent_node", None)
    known = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    name = key.rpartition(".")[2]
    missing = str(getattr(cause, "key", None) or name)
    if f"{key}." in OPEN_MAPPINGS:
        return f"{key} takes new entries with a +, as +{key}.NAME=VALUE"
    if key.startswith(OPEN_MAPPINGS):
        return f"no entry {key!r} yet; to add it write +{key}=VALUE"
    if not known and (section := key.rpartition(".")[0]):
        return f"no key {key!r}: {section} is null; give it whole, as {section}={{KEY: VALUE, ...}}"
    return f"no key {key!r}; {nearest(missing, known)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _inclusion_cycle(recipe: str, folders: Sequence[Path]) -> list[str]:
    """Return recipes that include each other in a ring, from the first to itself again."""

    def search(chain: list[str]) -> list[str]:
        for name in _included_recipes(chain[-1], folders):
            if name in chain:
                return [*chain[chain.index(name) :], name]
            if found := search([*chain, name]):
                return found
        return []

    return search([recipe])


def _included_recipes(recipe: str, folders: Sequence[Path]) -> list[str]:
    path = next((p for f in folders if (p := f / f"{recipe}.yaml").is_file()), None)
    if path is None:
        return []
    config = OmegaConf.load(path)
    entries = config.get("defaults", ()) if isinstance(config, DictConfig) else ()
    names = []
    for entry in entries or ():
        # A name without a leading / is looked for in the including recipe's group, `recipe`.
        if isinstance(entry, str) and entry != "_self_":
            names.append(entry.partition("@")[0].removeprefix("/recipe/"))
        elif isinstance(entry, DictConfig):
            names += [
                str(value)
                for key, value in entry.items()
                if str(key).split()[-1].partition("@")[0].strip("/") == "recipe"
            ]
    return names

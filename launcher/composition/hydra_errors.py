"""Turn what Hydra, OmegaConf and PyYAML raise into messages of one kind."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig

from launcher.composition.choice import nearest
from launcher.composition.messages import OPEN_MAPPINGS, TOO_DEEP, entry_advice, first_line
from launcher.composition.recipe_file import find_recipe, included_recipes, parse_recipe
from launcher.composition.search import LauncherSearchPath
from launcher.errors import LauncherError, RecipeError, system_failure
from launcher.secrets import shown_override


@contextmanager
def refused_search_path() -> Iterator[None]:
    """Make errors of that of which Hydra only warns.

    That is a folder of hydra.searchpath that is not there, and a sweep's folder that is refused.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"Callback SweepFolder\.on_multirun_start raised")
        warnings.filterwarnings("error", message=r"provider=.* is not\s+available")
        yield


def composing_error(error: Exception, recipes: Sequence[Path], recipe: str | None) -> Exception:
    """Return what to raise for an error that came up while Hydra composed a config.

    Nothing of ours runs until then but the search for files, so what comes up is
    the input's fault. `recipes` are the folders in which an inclusion is looked
    for when a recipe includes itself.
    """
    if isinstance(error, (LauncherError, BrokenPipeError)):
        return error
    if isinstance(error, RecursionError):
        # A file that is too deep for Hydra may be too deep for this as well.
        with suppress(RecursionError):
            if chain := _inclusion_cycle(recipe or "", recipes):
                path = find_recipe(chain[0], recipes)
                return RecipeError(f"recipe includes itself: {' -> '.join(chain)} ({path})")
        return RecipeError(f"recipe {recipe!r}: a file of a group includes itself, or {TOO_DEEP}")
    if isinstance(error, OverrideParseException):
        return RecipeError(_grammar_message(error.override))
    if isinstance(error, UserWarning):
        if isinstance(refusal := error.__context__, Exception):
            return composing_error(refusal, recipes, recipe)
        return RecipeError(_search_path_message(str(error)))
    if isinstance(error, MissingConfigException):
        return RecipeError(_missing_message(error))
    if isinstance(error, OSError) and error.errno is not None:
        return system_failure(error)
    message = _hydra_message(error)
    return RecipeError(f"{message}\n  in recipe {recipe!r}" if recipe else message)


_GROUPS = (
    "model", "trainer", "data", "instance", "cluster", "resilience/checkpointless",
    "resilience/elastic", "resilience/faults", "resilience/mmap", "resilience/tiered",
)  # fmt: skip


def _grammar_message(override: str) -> str:
    """Say how to write an override that Hydra's grammar cannot read."""
    key, equals, value = override.partition("=")
    shown = f"override {shown_override(override)!r} cannot be read"
    if not equals:
        return f"{shown}: it has no =; write {key}=VALUE"
    if advice := entry_advice(key, value):
        return f"{shown}; {advice}"
    if value.startswith("~/"):
        return f"{shown}: a shell knows no ~ there; write {key}=$HOME{value[1:]}"
    if not _KEY.fullmatch(key):
        return f"{shown}: {key!r} is no key; a key is names with dots, as trainer.optimizer.lr"
    return (
        f"{shown}; quote a value that holds more than a word: {_quoted(override)} (a list is "
        "[A,B], a mapping is {KEY: VALUE})"
    )


def _sweep_message(override: str) -> str:
    """Say what an override with commas may have meant."""
    key, _, value = shown_override(override).partition("=")
    return (
        f"override {shown_override(override)!r} names several values; for one text quote it: "
        f"{_quoted(override)}, for a list write {shlex.quote(f'{key}=[{value}]')}, and for a job "
        "for each add --multirun"
    )


def _quoted(override: str) -> str:
    key, _, value = override.partition("=")
    is_shown = shown_override(override) == override
    return quoted_override(key, value if is_shown else "VALUE")


_KEY = re.compile(r"(\+\+?|~)?[A-Za-z_][\w-]*([./][\w-]+)*(@[\w.:]*)?")


def quoted_override(key: str, value: str) -> str:
    """Return an override, as it is typed in a shell, that gives a key this text as it is."""
    if not set(value) & set("'\"\\$`!"):
        return f"\"{key}='{value}'\""
    # Hydra takes a backslash for one only in front of a quote.
    inner = re.sub(r"(\\*)(\"|$)", lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
    return shlex.quote(f'{key}="{inner}"')


def _search_path_message(warning: str) -> str:
    path = warning.partition("path=")[2].removesuffix(" is not available.")
    return (
        f"hydra.searchpath names {path!r}, which is no folder that can be read; allowed: a list "
        "of folders as file:///PATH, or of packages as pkg://NAME"
    )


def _missing_message(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = [option for option in error.options or () if not option.startswith("_")]
    if not group:
        return str(error).partition("\n")[0]
    if not options:
        files = (f for c in LauncherSearchPath.conf for f in (c / group).glob("[!_]*.yaml"))
        options = sorted({file.stem for file in files})
    close = nearest(name, options)
    everything = "" if close.startswith("allowed") else f"; allowed: {', '.join(options)}"
    return f"no {group} {name!r}; {close}{everything}"


def _hydra_message(error: Exception) -> str:
    cause = error.__cause__
    text = str(error).strip()
    if mixed := _mixed_message(text, cause):
        return mixed
    if found := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        return f"no group {found[1]!r} to override; {nearest(found[1], _GROUPS)}"
    if found := re.match(r"Could not override '([^']+)'", text):
        return _no_key_message(found[1], cause)
    if found := re.match(r"Error merging override (.*)", text, re.DOTALL):
        return f"override {shown_override(found[1])!r}: {first_line(cause or error)}"
    if found := re.match(r"Multiple values for (\S+)\. .*'override \S+: (\S+)'", text):
        group, option = found[1], found[2]
        return (
            f"{group} is chosen twice; write {group}={option} without a +, and in a recipe's "
            f"defaults `override /{group}: {option}`; of two recipes that both choose it, one "
            "alone can be included"
        )
    if text.startswith("Config group override must be"):
        if text.endswith("NoneType"):
            remedy = "leave a feature out as resilience.mmap=null"
        else:
            remedy = "as trainer=torch"
        return f"a group takes the name of one of its options; {remedy}"
    if found := re.search(r"(\S+) appears more than once in the final defaults list", text):
        return (
            f"{found[1]} is chosen by two of the files that are included; include one of them, or "
            f"let the other begin with it and write `override /{found[1]}: NAME`"
        )
    if found := re.search(r"Override '(\S+) : (\S+)' is defined before '", text):
        return (
            f"`override /{found[1]}: {found[2]}` stands before a recipe that is included; in "
            "`defaults` each override stands after all of them"
        )
    if found := re.match(r"Ambiguous value for argument '(.*)'$", text.partition("\n")[0]):
        return _sweep_message(found[1])
    if not text and cause is not None:
        return first_line(cause)
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _mixed_message(text: str, cause: BaseException | None) -> str | None:
    """Say how to replace a list by a mapping, or the other way; None for any other error."""
    if found := re.match(r"invalid literal for int\(\) with base 10: (.*)", text):
        return f"no entry {found[1]} of a list, which has no names; give it whole, as KEY=[A,B]"
    if not re.search(r"merge (DictConfig|ListConfig) with (List|Dict)Config", f"{text} {cause}"):
        return None
    why = "a list and a mapping do not merge"
    if found := re.match(r"Error merging override (.*)", text, re.DOTALL):
        override = shown_override(found[1])
        key, _, value = override.lstrip("+").partition("=")
        words = shlex.join([f"~{key}", f"+{key}={value}"])
        return f"override {override!r}: {why}; to replace what the recipe has write {words}"
    where = re.match(r"In '([^']+)'", text)
    here = where[1] if where else "files"
    return f"{here}: {why}; give the key in the form that its included files have"


def _no_key_message(key: str, cause: BaseException | None) -> str:
    parent = getattr(cause, "parent_node", None)
    known = [str(name) for name in parent] if isinstance(parent, DictConfig) else []
    name = key.rpartition(".")[2]
    missing = str(getattr(cause, "key", None) or name)
    is_in_mapping = not any(mapping.endswith(f".{missing}.") for mapping in OPEN_MAPPINGS)
    if is_in_mapping and (advice := entry_advice(key, "VALUE")):
        return f"no entry {key!r} yet; {advice}"
    if f"{key}." in OPEN_MAPPINGS:
        return f"{key} takes new entries with a +, as +{key}.NAME=VALUE or '+{key}={{NAME: VALUE}}'"
    if is_in_mapping and key.startswith(OPEN_MAPPINGS):
        return f"no entry {key!r} yet; to add it write +{key}=VALUE"
    if not known and (section := key.rpartition(".")[0]):
        return f"no key {key!r}: {section} is null; give it whole, as {section}={{KEY: VALUE, ...}}"
    others = "; cluster=NAME chooses another" if key.startswith("cluster.") else ""
    return f"no key {key!r}; {nearest(missing, known)}{others}"


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
    path = find_recipe(recipe, folders)
    return [] if path is None else [*included_recipes(parse_recipe(path, recipe, folders)[1])]

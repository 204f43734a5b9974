"""The command `explain`: where the values of a recipe come from."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.commands.command_line import ordered_arguments
from launcher.composition.choice import nearest
from launcher.composition.compose import compose_recipe, fold_recipe
from launcher.composition.shown import shown_content, written_content
from launcher.errors import RecipeError
from launcher.monitor.logs import plain
from launcher.paths import find_folders
from launcher.provenance.explained import (
    Explained,
    Explainer,
    explained_data,
    explained_lines,
    origin_text,
)

_OPTIONS = ("--all", "--json")
_HOW_TO_SEE = "--all shows them too, KEY a key or section"
_NEAR_MAX = 3
_LIKENESS_MIN = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    recipe: str
    overrides: tuple[str, ...]
    keys: tuple[str, ...]
    wants_all: bool
    wants_json: bool


def print_explanation(arguments: Sequence[str], start: Path) -> int:
    """Print where the values come from that were asked for; returns 0. Raises RecipeError."""
    asked = _parse(arguments, start)
    config, _ = compose_recipe(asked.recipe, asked.overrides, start)
    written = written_content(config)
    folded = fold_recipe(asked.recipe, asked.overrides, start)
    explainer = Explainer(written, shown_content(written), folded)
    for key in asked.keys:
        _check_key(key, explainer)
    found = explainer.explain(asked.keys or None)
    told = found if asked.keys or asked.wants_all else [each for each in found if _is_set(each)]
    if asked.wants_json:
        sys.stdout.write(json.dumps([explained_data(each) for each in told], indent=2) + "\n")
        return 0
    for each in told:
        for line in explained_lines(each):
            sys.stdout.write(f"{plain(line)}\n")
    if num_left := len(found) - len(told):
        sys.stdout.write(f"{num_left} more keys are as their groups have them; {_HOW_TO_SEE}\n")
    return 0


def _parse(arguments: Sequence[str], start: Path) -> _Asked:
    given = [each for each in arguments if each not in _OPTIONS]
    keys = tuple(each for each in given if "=" not in each and not each.startswith(("-", "~")))
    options = [each for each in given if each.startswith("-")]
    if options:
        raise RecipeError(f"no option {options[0]!r}; {nearest(options[0], _OPTIONS)}")
    overrides = ordered_arguments(
        [each for each in given if each not in keys], find_folders(start).recipes
    )
    recipes = [each for each in overrides if each.startswith("recipe=")]
    if len(recipes) != 1:
        raise RecipeError("explain takes one recipe, as recipe=NAME; `list` shows them")
    return _Asked(
        recipe=recipes[0].removeprefix("recipe="),
        overrides=tuple(each for each in overrides if each not in recipes),
        keys=keys,
        wants_all="--all" in arguments,
        wants_json="--json" in arguments,
    )


def _is_set(each: Explained) -> bool:
    """Return whether a recipe or an override has set a key, or nobody knows who."""
    return each.origin is None or each.origin.file is None or each.origin.is_recipe


def _check_key(key: str, explainer: Explainer) -> None:
    if explainer.explain([key]):
        return
    if origin := explainer.removed_by(key):
        raise RecipeError(f"no key {key!r}: it was removed by {origin_text(origin)}")
    raise RecipeError(f"no key {key!r}; closest: {', '.join(_nearest_keys(key, explainer.keys()))}")


def _nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the keys and sections that are spelled alike as a whole, or but for their section."""
    last = key.rpartition(".")[2]

    def likeness(each: str) -> float:
        pairs = (key, each), (last, each.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    sections = {each.rpartition(".")[0] for each in known} - {""}
    ranked = sorted([*known, *sorted(sections)], key=likeness, reverse=True)[:_NEAR_MAX]
    return [repr(each) for each in ranked if likeness(each) >= _LIKENESS_MIN or each == ranked[0]]

"""The command `diff`: in which values two recipes or runs differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.commands.sight import RUNS_FOLDER, run_folders
from launcher.composition.aliases import find_renamed
from launcher.composition.choice import list_recipes, nearest
from launcher.composition.compose import compose_recipe, fold_recipe
from launcher.composition.shown import shown_content, written_content
from launcher.errors import RecipeError
from launcher.monitor.logs import plain
from launcher.paths import find_folders, readable_path
from launcher.provenance.difference import Side, difference_lines, find_differences
from launcher.provenance.fold import FileLayer, Origin, fold
from launcher.provenance.lines import parse_lines
from launcher.rundir import JOB_FILE
from launcher.secrets import masked
from launcher.written.texts import to_text
from resilience.plain_files import parse_json, read_plain_text

DIFFERENT_STATUS = 1
_OF_NO_JOB = ("action", "oversubscribe", "plan", "run")
"""Sections that say what is done with a job, and are none of it."""
_OF_NO_RECIPE = ("cluster", "name")
"""Sections in which a run differs from its own recipe."""


def print_difference(arguments: Sequence[str], start: Path) -> int:
    """Print each key in which two differ; returns 0 where there is none, else 1.

    Raises RecipeError where one of the two is neither recipe nor run.
    """
    words = [each for each in arguments if each != "--origins"]
    if len(words) != 2 or any(each.startswith("-") for each in words):
        raise RecipeError(
            "diff takes two recipes, files or runs, and --origins; `list` and `runs` show them"
        )
    runs = [_find_run(word, start) for word in words]
    left_out = (*_OF_NO_JOB, *(() if all(runs) or not any(runs) else _OF_NO_RECIPE))
    has_origins = "--origins" in arguments
    sides = [
        _run_side(word, run, start) if run else _recipe_side(word, start, has_origins=has_origins)
        for word, run in zip(words, runs, strict=True)
    ]
    contents = [{k: v for k, v in side.content.items() if k not in left_out} for side in sides]
    found = list(find_differences(contents[0], contents[1]))
    for each in found:
        for line in difference_lines(each, sides if has_origins else ()):
            sys.stdout.write(f"{plain(line)}\n")
    return DIFFERENT_STATUS if found else 0


def _find_run(word: str, start: Path) -> Path | None:
    """Return the job.json of a run that is named by its folder, or its name below ./runs.

    None where a recipe is named. Raises RecipeError for anything else.
    """
    folders = find_folders(start).recipes
    recipes = list_recipes(folders)
    for folder in (start / word, start / RUNS_FOLDER / word):
        if word and (folder / JOB_FILE).is_file():
            return folder / JOB_FILE
    name = word.partition("@")[0]
    if word.endswith((".yaml", ".yml")) or name in recipes or find_renamed(name, folders):
        return None
    if (start / word).is_dir():
        raise RecipeError(f"folder {word!r} holds no run: it has no {JOB_FILE}")
    runs = start / RUNS_FOLDER
    names = [str(path.relative_to(runs)) for path in run_folders(runs)]
    raise RecipeError(f"no recipe and no run {word!r}; {nearest(word, [*recipes, *names])}")


def _recipe_side(name: str, start: Path, *, has_origins: bool) -> Side:
    config, _ = compose_recipe(name, start=start)
    content = shown_content(written_content(config))
    if isinstance(env := content.get("env"), dict):
        # As a job has them.
        content["env"] = {name: to_text(value) for name, value in env.items()}
    return Side(
        name=name, content=content, folded=fold_recipe(name, start=start) if has_origins else None
    )


def _run_side(name: str, path: Path, start: Path) -> Side:
    """Return a run's own job, as it was resolved at its start."""
    try:
        text = read_plain_text(path)
        content: Any = parse_json(text)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RecipeError(f"{path}: broken JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is no mapping of keys to values")
    origin = Origin(file=readable_path(path.resolve(), start), path=str(path))
    folded = fold([FileLayer(content, parse_lines(text), origin)])
    return Side(name=name, content=masked(content), folded=folded)

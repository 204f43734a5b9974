"""Turn a composed Hydra config into a Job.

Reading files is Hydra's part; from here on everything is a function of the
config. Every message names the key as a person writes it on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from launcher.choice import nearest
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.messages import validation_problems

ACTIONS = ("render", "run", "submit")
_JOB_KEYS = tuple(name for name in Job.model_fields if name != "name")
_RUN_KEYS = ("name", "dir")


def job_from_config(config: DictConfig, suffix: str = "") -> Job:
    """Return the job of a composed config; `suffix` ends its name (for sweeps).

    Raises RecipeError that names the field, its value and what is allowed.
    """
    content = _plain(config)
    recipe = content.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    where = f"in recipe {name!r}" if name else "in the recipe"
    if problems := list(_unknown_keys(content)):
        raise RecipeError("\n".join([*problems, f"  {where}"]))
    job = {key: content[key] for key in _JOB_KEYS if key in content}
    job["name"] = _job_name(content["run"]["name"], name, suffix)
    try:
        return Job.model_validate_json(json.dumps(job), strict=True)
    except ValidationError as error:
        raise RecipeError("\n".join([*validation_problems(error, Job), f"  {where}"])) from error


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'the recipe'}: {_first_line(error)}") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _unknown_keys(content: Mapping[str, Any]) -> Iterable[str]:
    yield from _unknown(content, (*_JOB_KEYS, "action", "run"), "")
    run = content.get("run")
    if isinstance(run, dict):
        yield from _unknown(run, _RUN_KEYS, "run.")
    if content.get("action") not in ACTIONS:
        action = content.get("action")
        yield f"action {action!r}: {nearest(str(action), ACTIONS)}; allowed: {', '.join(ACTIONS)}"


def _unknown(content: Mapping[str, Any], known: Sequence[str], prefix: str) -> Iterable[str]:
    for key in content:
        if key not in known:
            yield f"no key {prefix + key!r}; {nearest(key, known)}"


def _job_name(given: object, recipe: object, suffix: str) -> object:
    if given is None and isinstance(recipe, str):
        given = recipe.rpartition("/")[2].replace("_", "-")
    return given + suffix if isinstance(given, str) else given

"""Turn a composed Hydra config into a Job.

Reading files is Hydra's part; from here on everything is a function of the
config. Every message names the key as a person writes it on the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError

from launcher.composition.choice import nearest
from launcher.composition.messages import TOO_DEEP, first_line, validation_problems
from launcher.composition.references import foreign_resolvers, growth_problem
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.job.content import RECIPE_NAME
from launcher.job.fields import OneLine, Section
from launcher.support import DEFAULT_IMAGE
from resilience.settings import StoreUrl

# A value of its own kind, by which it is known that nobody named an image.
OmegaConf.register_new_resolver("default_image", lambda: DEFAULT_IMAGE, replace=True)

_Model = TypeVar("_Model", bound=BaseModel)
_JOB_KEYS = tuple(name for name in Job.model_fields if name != "name")


class _Run(Section):
    name: str | None
    dir: OneLine | None
    detach: bool
    """Whether action=run returns once the run has started."""
    take_over: bool
    """Whether the run takes the namespace of its store from another run."""


class _Plan(Section):
    mfu: Annotated[float, Field(gt=0, le=1)]
    """Share of the devices' peak with which a run is planned."""
    force: bool
    """Whether action=submit hands over what surely does not fit its devices."""


class Beside(Section):
    """What a config says beside the job."""

    action: Literal["render", "run", "submit"]
    oversubscribe: bool
    """Whether action=run starts what this machine is too small for."""
    plan: _Plan
    run: _Run


class _Site(Section):
    """What a cluster's profile says for recipes to take, and no job has of it."""

    checkpoint_store_url: StoreUrl | None = None


class _Profile(Section):
    cluster: _Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a composed config asks for."""

    beside: Beside
    has_default_image: bool
    """Whether nobody named the image, neither a person nor a cluster's profile."""
    job: Job


TellOrigins = Callable[[Sequence[str]], list[str]]
"""Adds to messages where the values come from that they name."""


def request_from_config(
    config: DictConfig,
    suffix: str = "",
    found_by: str | None = None,
    tell_origins: TellOrigins = list,
) -> Request:
    """Return what a config asks for.

    `suffix` ends the job's name (for sweeps). `found_by` is the name by which the recipe was
    found, which has to be its own; None where it was given as a file's path. `tell_origins` gets
    the messages about wrong fields and broken rules.
    Raises RecipeError that names the field, its value and what is allowed.
    """
    content = _plain(config)
    recipe = content.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    where = f"in recipe {name!r}" if name else "in the recipe"
    problems = [*_unknown_keys(content), *_wrong_name(name, found_by)]
    if problems:
        raise RecipeError("\n".join([*problems, f"  {where}"]))
    job = {key: content[key] for key in _JOB_KEYS if key in content}
    validate = partial(_validate, where=where, tell_origins=tell_origins)
    beside = validate(Beside, {key: content.get(key) for key in Beside.model_fields})
    job["name"] = _job_name(beside.run.name, name, suffix)
    if isinstance(cluster := content.get("cluster"), dict):
        site = {key: value for key, value in cluster.items() if key in _Site.model_fields}
        validate(_Profile, {"cluster": site})
        job["cluster"] = {key: value for key, value in cluster.items() if key not in site}
    return Request(
        beside=beside, has_default_image=_takes_default_image(config), job=validate(Job, job)
    )


def _takes_default_image(config: DictConfig) -> bool:
    """Return whether cluster.image is still what our own profile has, and nobody's choice."""
    content: Any = OmegaConf.to_container(config, resolve=False)
    cluster = content.get("cluster")
    return isinstance(cluster, dict) and cluster.get("image") == "${default_image:}"


def _wrong_name(name: object, found_by: str | None) -> Iterable[str]:
    """Yield a message where a recipe has not the name by which it was found."""
    if found_by is None or name is None or name == found_by:
        return
    if not re.fullmatch(RECIPE_NAME, found_by):
        yield (
            f"recipe {found_by!r}: a recipe's name has a-z, 0-9, _ and / alone; rename its file "
            "or folder, and set recipe.name to the new name"
        )
        return
    yield (
        f"recipe.name {name!r} is not the name by which the recipe is found; allowed: "
        f"{found_by!r}, in the recipe's file (a recipe given as a file's path keeps its own)"
    )


def _refuse(value: object) -> Any:
    raise RecipeError(
        f"a value of the recipe is {type(value).__name__}; allowed: text, numbers, true, false, "
        "null, lists and mappings"
    )


def _validate(
    model: type[_Model], content: Mapping[str, Any], where: str, tell_origins: TellOrigins
) -> _Model:
    try:
        return model.model_validate_json(json.dumps(content, default=_refuse), strict=True)
    except ValidationError as error:
        problems = "\n".join(validation_problems(error, model)).splitlines()
        raise RecipeError("\n".join([*tell_origins(problems), f"  {where}"])) from error


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        raw = OmegaConf.to_container(config, resolve=False)
        assert isinstance(raw, dict)
        if problems := list(_foreign_resolvers(raw)):
            raise RecipeError("\n".join(problems))
        if problem := growth_problem({str(key): value for key, value in raw.items()}):
            raise RecipeError(problem)
        if missing := list(missing_keys(raw)):
            lines = [f"no value for {key!r}; set it, as {key}=VALUE" for key in missing]
            raise RecipeError("\n".join(lines))
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'the recipe'}: {first_line(error)}") from error
    except RecursionError as error:
        raise RecipeError(f"the recipe: {TOO_DEEP}") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def missing_keys(node: object) -> Iterator[str]:
    """Yield the keys of plain data that are ???: what whoever runs the recipe has to set."""
    return (key for key, value in _leaves(node, "") if value == MISSING)


def _leaves(node: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield (key as a person writes it, value) for each value that holds no others."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{where}[{index}]")
    else:
        yield where, node


def _unknown_keys(content: Mapping[str, Any]) -> Iterable[str]:
    known = (*_JOB_KEYS, *Beside.model_fields)
    for key in content:
        if key not in known:
            yield f"no key {key!r}; {nearest(key, known)}"


def _foreign_resolvers(node: object) -> Iterator[str]:
    """Yield a message for each value that depends on the machine or the moment of rendering."""
    for where, value in _leaves(node, ""):
        if not isinstance(value, str) or where == "run.dir":
            continue
        for name in foreign_resolvers(value):
            yield (
                f"{where} takes its value from ${{{name}:...}}, and a job may hold nothing of "
                "the machine or the time it is rendered at; write the value itself, a reference "
                "under cluster.secrets, or ${KEY} or ${oc.select:KEY,DEFAULT}, KEY without quotes"
            )


def _job_name(given: str | None, recipe: object, suffix: str) -> str | None:
    if given is None and isinstance(recipe, str):
        given = recipe.rpartition("/")[2].replace("_", "-")
    return None if given is None else given + suffix

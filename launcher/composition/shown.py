"""A composed config as a person may see it: references followed, and no secret.

Nothing here asks that the config makes a job. What cannot be followed, and what depends on the
machine or the moment, stays as it was written.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.composition.references import foreign_resolvers, growth_problem
from launcher.errors import RecipeError
from launcher.secrets import masked
from launcher.written.texts import map_texts

# Takes the place of $ in a text that is not to be followed; no value of a job has it.
_DOLLAR = "\ue000"


def written_content(config: DictConfig) -> dict[Any, Any]:
    """Return a config as plain data with its references as they were written.

    Raises RecipeError where they would grow beyond all bounds.
    """
    content: Any = OmegaConf.to_container(config, resolve=False)
    if problem := growth_problem(content):
        raise RecipeError(problem)
    return dict(content)


def shown_content(written: dict[Any, Any]) -> dict[Any, Any]:
    """Return the plain data of a config with its references followed, and without secrets.

    Secrets are taken out first, so that no reference can fetch one.
    """
    safe = map_texts(masked(written), _without_foreign)
    config = OmegaConf.create(safe)
    return {key: _followed(config, key, value) for key, value in safe.items()}


def _without_foreign(text: str) -> str:
    """Return a text that takes nothing from outside."""
    return text.replace("$", _DOLLAR) if any(foreign_resolvers(text)) else text


def _with_dollars(node: object) -> Any:
    return map_texts(node, lambda text: text.replace(_DOLLAR, "$"))


def _followed(config: Any, key: Any, node: object) -> Any:
    """Return what lies at a key of a config, where `node` is the same as plain data."""
    if isinstance(node, dict):
        return {each: _followed(config[key], each, value) for each, value in node.items()}
    if isinstance(node, list):
        return [_followed(config[key], each, value) for each, value in enumerate(node)]
    if not isinstance(node, str) or "${" not in node:
        return _with_dollars(node)
    try:
        found = config[key]
        plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except (OmegaConfBaseException, RecursionError):
        return node
    return _with_dollars(plain)

"""What a recipe says, whoever runs it and wherever: as plain values, and as a digest of them. Pure.

A run has another digest, that of its job, which holds the cluster and the run's name as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.composition.messages import first_line
from launcher.errors import RecipeError

BESIDE = ("action", "cluster", "hydra", "oversubscribe", "plan", "run")
"""Keys that say how and where a recipe is run, and nothing of what it trains."""


def recipe_values(config: Mapping[str, Any], cluster: str | None) -> dict[str, Any]:
    """Return what a composed config says of the recipe, its references followed.

    `cluster` is the option that the recipe itself has chosen, which counts by its name. What is
    left to whoever runs it is null, and a null is left out: a key that is new, and is off unless
    it is set, changes no older recipe. Raises RecipeError.
    """
    content = {key: value for key, value in config.items() if key not in BESIDE}
    # A profile's values are those of a site.
    open_content = _without_missing({**content, "cluster": {}})
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(open_content), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'the recipe'}: {first_line(error)}") from error
    assert isinstance(resolved, dict)
    values = _without_nulls({key: value for key, value in resolved.items() if key != "cluster"})
    values.get("recipe", {}).pop("description", None)
    return {**values, "cluster": cluster} if cluster else values


def recipe_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a recipe says, in hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key whose value differs, with both values; null is what is not there.

    The version's own number is no change.
    """
    old, new = dict(_leaves(before, "")), dict(_leaves(now, ""))
    for key in sorted({*old, *new} - {"recipe.version"}):
        if old.get(key) != new.get(key):
            yield f"{key}: {_show(old.get(key))} -> {_show(new.get(key))}"


def _show(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _leaves(node: object, where: str) -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    else:
        yield where, node


def _without_missing(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_missing(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_missing(value) for value in node]
    return None if node == MISSING else node


def _without_nulls(node: Any) -> Any:
    """Return plain data without keys that are null; entries of lists stay."""
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return node

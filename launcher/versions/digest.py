"""What a recipe says, whoever runs it and wherever: as plain values, and as a digest of them. Pure.

A run has another digest, that of its job, which holds the cluster and the run's name as well.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.composition.frozen import BESIDE, File, canonical_json
from launcher.composition.messages import first_line
from launcher.composition.references import foreign_resolvers
from launcher.errors import RecipeError
from launcher.provenance.difference import ABSENT, find_differences
from launcher.provenance.place import key_of
from launcher.written.texts import map_texts

_CLUSTER_KEY = re.compile(r"override\s+/cluster(@\S+)?")
_LEFT_OUT = "(left out)"
_OPEN = re.compile(rf"\$\{{\s*(?:[\w.]+:\s*)?\.*(?:{'|'.join(BESIDE)})\b")
_OFF = re.compile(r"\$\{oc\.select:[\w.]+,\s*null\}")


def recipe_values(
    config: Mapping[str, Any], cluster: str | None, *, is_written: bool = False
) -> dict[str, Any]:
    """Return what a composed config says of the recipe, its references followed.

    `cluster` is the option that the recipe itself has chosen, which counts by its name. What is
    left to whoever runs it, by ??? or by a reference to the run, its cluster or the machine, is
    null, and a null is left out: a key that is new, and is off unless it is set, changes no older
    recipe. A variable of the workers that is null counts: it leaves one of the launcher's out.
    With `is_written` a text with a reference to the run, its cluster or the machine is there as it
    is written, for a comparison. Raises RecipeError.
    """
    change = _written if is_written else _closed
    content = {key: map_texts(value, change) for key, value in config.items() if key not in BESIDE}
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(content), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{error.full_key or 'the recipe'}: {first_line(error)}") from error
    assert isinstance(resolved, dict)
    values = _without_nulls(resolved)
    if left_out := _left_out(config):
        values["env"] = {**values.get("env", {}), **left_out}
    values.get("recipe", {}).pop("description", None)
    return {**values, "cluster": cluster} if cluster else values


def chosen_cluster(files: Mapping[str, File]) -> str | None:
    """Return the cluster that the recipe or one that it includes chooses; the outermost wins."""
    for name, file in files.items():
        entries = file.content.get("defaults") or () if name.startswith("recipe/") else ()
        for entry in entries:
            for key, option in entry.items() if isinstance(entry, dict) else ():
                if _CLUSTER_KEY.fullmatch(str(key)):
                    return str(option)
    return None


def recipe_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of what a recipe says, in hexadecimal digits."""
    return hashlib.sha256(canonical_json(values).encode("ascii")).hexdigest()


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key whose value differs, with both values; null is what is not there.

    The version's own number is no change, nor is a new key that is off unless the cluster sets it.
    """
    for each in find_differences(before, now):
        is_off = ABSENT in each.values and any(_OFF.fullmatch(str(value)) for value in each.values)
        if each.place != ("recipe", "version") and not is_off:
            values = (None if value is ABSENT else value for value in each.values)
            old, new = (json.dumps(value, ensure_ascii=False, default=repr) for value in values)
            yield f"{key_of(each.place)}: {old} -> {new}"


def _closed(text: str) -> str | None:
    """Return a text, or null for one whose value depends on the run or its cluster."""
    is_open = text == MISSING or _OPEN.search(text) or any(foreign_resolvers(text))
    return None if is_open else text


def _written(text: str) -> str | None:
    """Return a text, with references that `_closed` does not know as text, or null for ???."""
    if _closed(text) is None and text != MISSING:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return _closed(text)


def _left_out(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the workers' variables that a recipe writes as null, with what stands for that."""
    env = config.get("env")
    names = [key for key, value in env.items() if value is None] if isinstance(env, dict) else []
    return dict.fromkeys(names, _LEFT_OUT)


def _without_nulls(node: Any) -> Any:
    """Return plain data without keys that are null; entries of lists stay."""
    if isinstance(node, dict):
        return {key: _without_nulls(value) for key, value in node.items() if value is not None}
    return node

"""JSON Schema of a recipe file, derived from the Job, for editors and checks.

A recipe leaves most keys to the groups that it selects, so nothing but
`recipe` is required, and any value may be an interpolation.
"""

from __future__ import annotations

import json
from typing import Any

from launcher.job import Job

_INTERPOLATION = {"type": "string", "pattern": r"\$\{.*\}"}


def recipe_schema_text() -> str:
    """Return the schema as indented JSON with a newline at the end."""
    return json.dumps(recipe_schema(), indent=2, sort_keys=True) + "\n"


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file."""
    job = Job.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = {
        name: definition if name == "RecipeInfo" else _loosen(definition)
        for name, definition in job["$defs"].items()
    }
    properties = {name: _loosen(value) for name, value in job["properties"].items()}
    properties["recipe"] = job["properties"]["recipe"]
    del properties["name"]
    properties["defaults"] = {
        "type": "array",
        "description": "What the recipe is composed of: groups such as /model: llama3_8b",
        "items": {"type": ["string", "object"]},
    }
    properties["run"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": ["string", "null"]} for name in ("name", "dir")},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["recipe"],
        "properties": properties,
        "$defs": definitions,
    }


def _loosen(node: Any) -> Any:
    """Return a schema in which no key is required and any scalar may be an interpolation.

    A part of a recipe rarely says which member of a union it is, so one of
    several that fit is as good as exactly one.
    """
    if isinstance(node, list):
        return [_loosen(item) for item in node]
    if not isinstance(node, dict):
        return node
    loose = {
        key: _loosen(value)
        for key, value in node.items()
        if key not in {"required", "discriminator", "oneOf", "default", "properties"}
    }
    if "properties" in node:
        loose["properties"] = {name: _loosen(value) for name, value in node["properties"].items()}
    if "oneOf" in node:
        loose["anyOf"] = _loosen(node["oneOf"])
    is_scalar = node.get("type") in {"integer", "number", "boolean"} or (
        node.get("type") == "string" and ("enum" in node or "const" in node)
    )
    return {"anyOf": [loose, _INTERPOLATION]} if is_scalar else loose

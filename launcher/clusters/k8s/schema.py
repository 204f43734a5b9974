"""Hold a document against published schemas, and against limits of ours that are laid over them.

schemas/ has both; each file of published ones names its source. Of JSON Schema's words those have a
meaning that stand there. A field that is null counts as left out, as it does to Kubernetes, and an
object that names its fields has no others: some clusters drop a misspelt one without a word.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from launcher.clusters.k8s.forms import CHECKS, QUANTITY, problem
from launcher.clusters.k8s.joined import RULES
from launcher.composition.choice import nearest
from launcher.job.fields import matching

_Schema = Mapping[str, Any]

FOLDER = Path(__file__).with_name("schemas")
FILES = ("kubernetes.json", "hyperpod.json", "kubeflow.json", "limits.json")
"""The published schemas, and what is laid over them."""
_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "text"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "quantity": ((str, int, float), QUANTITY),
    "boolean": (bool, "true, false"),
    "array": (list, "a list"),
    "object": (dict, "a mapping of fields to values"),
}
"""Of each type the classes of its values, and its words in a message."""
_ANY_TEXT = {"type": "string"}


class Schemas(NamedTuple):
    """The definitions by name, and what names them."""

    kinds: Mapping[str, str]
    """Of each apiVersion and kind that has a definition its name."""
    definitions: Mapping[str, _Schema]
    checks: Mapping[str, Callable[[Any], object]]
    """Of each format: it raises ValueError."""


@functools.cache
def read_schemas() -> Schemas:
    """Return what the files have, each laid over those before."""
    files = [json.loads((FOLDER / each).read_text("utf-8")) for each in FILES]
    kinds = {kind: name for each in files for kind, name in each.get("kinds", {}).items()}
    definitions: dict[str, _Schema] = {}
    for each in files:
        for name, own in each["definitions"].items():
            definitions[name] = _laid_over(definitions[name], own) if name in definitions else own
    forms = {name: matching(**own) for name, own in files[-1]["forms"].items()}
    return Schemas(kinds, definitions, {**CHECKS, **forms})


def _laid_over(base: _Schema, own: _Schema) -> dict[str, Any]:
    merged = {**base, **own}
    for name in base.keys() & own.keys():
        if isinstance(own[name], Mapping):
            merged[name] = _laid_over(base[name], own[name])
    return merged


def schema_problems(value: Any, where: str, schema: _Schema) -> Iterator[str]:
    """Yield a message for everything wrong: its path, its value, and what is allowed."""
    if name := schema.get("$ref", ""):
        found = read_schemas().definitions[name]
        schema = _laid_over(found, schema) if len(schema) > 1 else found
    if schema == _ANY_TEXT and isinstance(value, str):
        return
    if allowed := _refusal(value, schema):
        yield problem(where, value, allowed)
    elif isinstance(value, list):
        yield from _item_problems(value, where, schema)
    elif "properties" in schema:
        problems = [*_field_problems(value, where, schema)]
        yield from problems or _joint_problems(value, where, schema, name)
    elif isinstance(value, dict):
        for key, each in value.items():
            if of_keys := schema.get("propertyNames"):
                yield from schema_problems(key, f"{where} key", of_keys)
            if of_values := schema.get("additionalProperties"):
                yield from schema_problems(each, f"{where}[{key!r}]", of_values)


def _refusal(value: Any, schema: _Schema) -> str:
    """Return what is allowed in place of a value by itself, '' where it is sound."""
    if "enum" in schema:
        return "" if value in schema["enum"] else f"allowed: {', '.join(map(repr, schema['enum']))}"
    kind = schema.get("type", "string" if "format" in schema else "object")
    kinds = kind if isinstance(kind, list) else (kind,)
    low, high = schema.get("minimum", schema.get("minItems")), schema.get("maximum")
    size = len(value) if isinstance(value, list) else value
    is_sound = any(_is_of(value, each) for each in kinds)
    if is_sound and (low is None or size >= low) and (high is None or size <= high):
        return _format_refusal(value, schema["format"]) if "format" in schema else ""
    words = " or ".join(_TYPES[kind][1] for kind in kinds)
    words += "" if low is None else f" of at least {low}"
    words += " items" if "minItems" in schema else ""
    return f"allowed: {words}" + ("" if high is None else f", at most {high}")


def _format_refusal(value: Any, form: str) -> str:
    try:
        read_schemas().checks[form](value)
    except ValueError as error:
        return str(error)
    return ""


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind][0]) and isinstance(value, bool) == (kind == "boolean")


def _item_problems(value: list[Any], where: str, schema: _Schema) -> Iterator[str]:
    (unique,) = schema.get("x-kubernetes-list-map-keys", [None])
    seen = set()
    for index, item in enumerate(value):
        yield from schema_problems(item, f"{where}[{index}]", schema["items"])
        name = item.get(unique) if unique and isinstance(item, dict) else None
        if isinstance(name, str):
            if name in seen:
                yield problem(f"{where}[{index}].{unique}", name, f"allowed: each {unique} once")
            seen.add(name)


def _field_problems(value: dict[str, Any], where: str, schema: _Schema) -> Iterator[str]:
    fields = schema["properties"]
    for field in schema.get("required", ()):
        if value.get(field) is None:
            yield f"{where}.{field} is missing"
    for field in value:
        if field not in fields:
            yield f"{where} has no field {field!r}; {nearest(str(field), fields)}"
    for field in sorted(value.keys() & fields.keys()):
        if value[field] is not None:
            yield from schema_problems(value[field], f"{where}.{field}", fields[field])


def _joint_problems(value: dict[str, Any], where: str, schema: _Schema, name: str) -> Iterator[str]:
    """Yield what is wrong between fields that are sound by themselves."""
    given = {field: each for field, each in value.items() if each is not None}
    if names := schema.get("exactly-one"):
        found = sorted(given.keys() - {"name"} if names == "kinds" else given.keys() & set(names))
        if len(found) != 1:
            own = f" {given['name']!r}" if "name" in given else ""
            of = "" if names == "kinds" else f" of {', '.join(names)}"
            yield problem(f"{where}{own}", found, f"allowed: exactly one{of}")
    for field, limit in schema.get("at-most", {}).items():
        if limit in given and given.get(field, 0) > given[limit]:
            allowed = f"allowed: at most {limit}, {given[limit]}"
            yield problem(f"{where}.{field}", given[field], allowed)
    for field, other in schema.get("same-as", {}).items():
        if given.get(field) != given.get(other):
            allowed = f"allowed: the same as {other}, {given.get(other)}"
            yield problem(f"{where}.{field}", given.get(field), allowed)
    for rule in schema.get("joined", ()):
        if all(_fits(given.get(field), each) for field, each in rule["if"].items()):
            allowed = "allowed: " + rule["allowed"].format(**given)
            for field, each in rule["then"].items():
                if not _fits(given.get(field), each):
                    yield problem(f"{where}.{field}", given.get(field), allowed)
    if name in RULES:
        yield from RULES[name](given, where)


def _fits(value: Any, wanted: list[Any] | bool) -> bool:
    if isinstance(wanted, bool):
        return wanted == (value not in (None, "", []))
    return value in wanted

"""Say in one line what is wrong: the field, its value, and what is allowed.

Turns the errors of pydantic, Hydra, OmegaConf and PyYAML into messages.
Nothing here decides; a message never shows what may be a secret.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launcher.composition.choice import nearest
from launcher.secrets import NOT_SHOWN, SECRET_FORMS, masked

_ALLOWED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}

TOO_DEEP = "its lists or mappings lie too deep within each other; a job's lie 8 deep at most"
# Sections whose keys are the person's own.
OPEN_MAPPINGS = (
    "env.",
    "cluster.secrets.",
    "cluster.labels.",
    "cluster.annotations.",
    "cluster.node_selector.",
    "cluster.affinity.required.",
    "cluster.extra_options.",
    "trainer.arguments.",
)


# Those whose names are Kubernetes' own, with dots and slashes, and what an entry of each holds.
_LABELS = {
    "cluster.labels.": '"{}"',
    "cluster.annotations.": '"{}"',
    "cluster.node_selector.": '"{}"',
    "cluster.affinity.required.": '["{}"]',
}


def entry_advice(key: str, value: str) -> str | None:
    """Say how to add an entry whose name has a . or /, as names of labels have; else None."""
    key = key.lstrip("+")
    for mapping, form in _LABELS.items():
        name = key.removeprefix(mapping)
        if name != key and re.fullmatch(r"[\w.-]*[./][\w./-]*", name):
            bare = re.sub(r"[\[\]'\"]", "", value) or "VALUE"
            entry = f"+{mapping[:-1]}={{{name}: {form.format(bare)}}}"
            return f"an entry whose name has . or / is written {shlex.quote(entry)}"
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without a full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def validation_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return a line for each problem that pydantic found in a `model`."""
    details = error.errors()
    groups = (*_UNIONS, "instance")
    incomplete = {name: line for name in groups if (line := _incomplete_group(name, details))}
    rest = [d for d in details if d["type"] != "missing" or d["loc"][0] not in incomplete]
    return list(dict.fromkeys([*incomplete.values(), *(_problem(each, model) for each in rest)]))


def _problem(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    path = _path(detail["loc"])
    # The job's name is the one field whose key is elsewhere.
    path = "run.name" if path == "name" else path
    if kind == "json_invalid":
        return "a value holds half of a surrogate pair; allowed: text that UTF-8 can write"
    if kind == "value_error" and not path:
        return str(context["error"])
    if kind == "extra_forbidden":
        known = _siblings(model, detail["loc"])
        return f"no key {path!r}; {nearest(str(detail['loc'][-1]), known)}"
    if kind == "missing":
        return f"no value for {path!r}; set it in the recipe or on the command line"
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        return _tag_problem(path, detail)
    value = masked(detail["input"], tuple(_without_tags(detail["loc"])))
    shown = NOT_SHOWN if path.startswith("env.") else _shown(value)
    advice = _nested_entry(path, value) if kind == "string_type" else None
    if kind.startswith("model_") and path.startswith("cluster.secrets."):
        advice = f"it says where the secret is, {SECRET_FORMS}"
    elif kind.startswith("model_") and isinstance(value, str):
        advice = f"an option of a group is chosen as {path.replace('.', '/')}={value}"
    return f"{path} {shown}: allowed: {_allowed(detail)}{f'; {advice}' if advice else ''}"


def _nested_entry(path: str, value: object) -> str | None:
    """Return how to write the entry that Hydra took apart at the dots of its name."""
    while isinstance(value, dict) and len(value) == 1:
        ((name, value),) = value.items()
        path = f"{path}.{name}"
    return None if isinstance(value, dict) else entry_advice(path, str(value))


def _incomplete_group(section: str, details: Sequence[ErrorDetails]) -> str | None:
    """Return one line for a group's file that lacks many keys, None where it lacks few.

    Or for a part of a group that was given without most of its own.
    """
    missing = [d["loc"] for d in details if d["type"] == "missing" and d["loc"][0] == section]
    if len(missing) < _MISSING_MAX:
        return None
    parts = {_path(location[:-1]) for location in missing}
    if len(parts) == 1 and (part := parts.pop()) != section:
        names = ", ".join(str(location[-1]) for location in missing)
        return f"{part} lacks {names}; give all of its keys"
    keys = ", ".join(_path(location).removeprefix(f"{section}.") for location in missing)
    remedy = (
        "its file has all of them"
        if section == "instance"
        else f"its file in conf/{section} begins with one of ours, as `defaults: [NAME, _self_]`"
    )
    return f"{section} lacks {keys}; {remedy}"


_MISSING_MAX = 3
"""Keys of one group that may be asked for one by one; a file that lacks more begins wrongly."""


def _allowed(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        return str(context["error"]).removeprefix("allowed: ")
    if kind == "literal_error":
        return str(context["expected"]) + _near(detail["input"], str(context["expected"]))
    for operator, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"),
                            ("lt", "less than")):  # fmt: skip
        if operator in context:
            return f"{words} {context[operator]}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind == "too_short":
        return f"at least {context['min_length']} entries"
    return _ALLOWED.get(kind, detail["msg"])


def _near(value: object, expected: str) -> str:
    """Return the option that a mistyped one is nearest to, as the end of a message."""
    close = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", expected), n=1)
    return f"; closest: {close[0]!r}" if close else ""


def _tag_problem(path: str, detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    field = str(context.get("discriminator", "'kind'")).strip("'")
    if detail["type"] == "union_tag_not_found":
        return (
            f"no value for '{path}.{field}'; choose one with {path}=NAME, or begin the file "
            f"conf/{path}/NAME.yaml with one of ours, as `defaults: [NAME, _self_]`"
        )
    expected = context["expected_tags"]
    return f"{path}.{field} {context['tag']!r}: allowed: {expected}"


def _path(location: tuple[int | str, ...]) -> str:
    """Return the key as a person writes it; pydantic adds union tags and [key] marks."""
    text = ""
    for part in _without_tags(location):
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


_UNIONS = {
    "model": {"llama", "gpt_oss"},
    "trainer": {"torch", "megatron", "script"},
    "data": {"stdlib_text", "jsonl", "s3_jsonl"},
    "cluster": {"local", "slurm", "k8s"},
}


def _without_tags(location: tuple[int | str, ...]) -> Iterator[int | str]:
    for index, part in enumerate(location):
        is_tag = index == 1 and part in _UNIONS.get(str(location[0]), ())
        if not is_tag and part != "[key]" and not str(part).startswith(("function-", "literal[")):
            yield part


def _siblings(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the section holding `location` knows."""
    schema = model.model_json_schema()
    node: dict[str, Any] = schema
    for part in location[:-1]:
        node = _step(schema, node, part)
    return sorted(_dereference(schema, node).get("properties", {}))


def _step(schema: dict[str, Any], node: dict[str, Any], part: int | str) -> dict[str, Any]:
    node = _dereference(schema, node)
    if part in node.get("properties", {}):
        child: dict[str, Any] = node["properties"][part]
        return child
    mapping = node.get("discriminator", {}).get("mapping", {})
    if part in mapping:
        return {"$ref": mapping[part]}
    inner: dict[str, Any] = node.get("items") or node.get("additionalProperties") or {}
    return inner


def _dereference(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    for option in node.get("anyOf", ()):
        if "$ref" in option:
            node = option
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        definition: dict[str, Any] = schema["$defs"][name]
        return definition
    return node


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = repr(value)
    if value == NOT_SHOWN or re.search(r"(?i)token|secret|passw", text):
        return NOT_SHOWN
    return text if len(text) <= 80 else text[:77] + "..."

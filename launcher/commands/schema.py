"""JSON Schema of a recipe file, derived from the Job, for editors and checks.

A recipe leaves most keys to the groups that it selects, so nothing but
`recipe` is required, and any value may be an interpolation. What an editor
shows beside a key is the docstring of its field, and the default that the
shipped file of its group in conf/ gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from launcher.job import Job
from launcher.paths import shipped_folder
from resilience.docstrings import field_docstrings

_Node = dict[str, Any]

# Another key's value, or ??? for what whoever runs the recipe has to set.
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.*\}|^\?\?\?$"}
_REFERENCE = re.compile(r'"#/\$defs/(\w+)"')
# What says something about a value and checks nothing; pydantic's other keys are checks.
_ANNOTATIONS = ("title", "description", "default")
# The file below conf/ that gives a section its defaults.
_DEFAULTS = {
    "TorchTrainer": "trainer/torch",
    "MegatronTrainer": "trainer/megatron",
    "ScriptTrainer": "trainer/script",
    "StdlibText": "data/stdlib_text",
    "Jsonl": "data/jsonl",
    "S3Jsonl": "data/s3_jsonl",
    "CheckpointlessSettings": "resilience/checkpointless/default",
    "ElasticSettings": "resilience/elastic/default",
    "FaultsSettings": "resilience/faults/default",
    "MmapSettings": "resilience/mmap/default",
    "TieredSettings": "resilience/tiered/_store",
}
# A model's file is a choice of dimensions, none of which is a default.
_MODELS = {"LlamaModel": "model/_llama3", "GptOssModel": "model/gpt_oss_tiny"}
_MODEL_KEYS = ("architecture", "weights")
# The files of this group all begin with the defaults above, and change some.
_TIERED = "resilience/tiered"


def recipe_schema_text() -> str:
    """Return the schema as indented JSON with a newline at the end."""
    return json.dumps(recipe_schema(), indent=2, sort_keys=True) + "\n"


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file; reads the shipped conf/."""
    job = Job.model_json_schema(by_alias=True, schema_generator=_DescribedSchema)
    definitions: _Node = {
        name: definition if name == "RecipeInfo" else _loosen(definition)
        for name, definition in job["$defs"].items()
    }
    properties = {name: _loosen(value) for name, value in job["properties"].items()}
    properties["recipe"] = job["properties"]["recipe"]
    for name in ("model", "data"):
        # Null is what a script has, whose recipe leaves the key out.
        node = properties[name]
        del node["default"]
        node["anyOf"] = node["anyOf"][0]["anyOf"]
    # A recipe may choose a cluster, and sets no key of one.
    del properties["name"], properties["cluster"]
    properties |= _launcher_properties()
    # Whoever inherits a recipe names the own one, and may leave the rest.
    definitions["RecipeInfo"]["required"] = ["name"]
    # A number or true becomes the text that it is written as.
    properties["env"]["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    _add_defaults(properties, definitions)
    _describe_tiers(definitions)
    used = _reachable({"properties": properties}, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["recipe"],
        "properties": properties,
        "$defs": {name: definitions[name] for name in sorted(used)},
    }


def _reachable(node: Any, definitions: _Node) -> set[str]:
    """Return the names of the definitions that a schema refers to, in each other as well."""
    found: set[str] = set()
    texts = [json.dumps(node)]
    while texts:
        for name in _REFERENCE.findall(texts.pop()):
            if name not in found:
                found.add(name)
                texts.append(json.dumps(definitions[name]))
    return found


class _DescribedSchema(GenerateJsonSchema):
    """Describes each property with the docstring of its field."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        texts = field_docstrings(schema["cls"])
        for name, field in schema["cls"].model_fields.items():
            if name in texts:
                described["properties"][field.alias or name]["description"] = texts[name]
        return described


def _launcher_properties() -> _Node:
    """Return the keys of a recipe that are the launcher's own and no part of the job."""
    texts = {
        "name": "Name of the job; null takes the last part of recipe.name, with - for _.",
        "dir": "Folder that the files of this run go to; null takes runs/NAME.",
    }
    switches = {
        "detach": "Whether action=run returns once the run has started, which goes on in the "
        "background.",
        "take_over": "Whether the run takes its store's namespace from another run, and goes on "
        "from that one's checkpoints.",
    }
    return {
        "defaults": {
            "type": "array",
            "description": "What the recipe is composed of: groups, such as /model: llama3_8b, and "
            "other recipes, in order; later ones win, and _self_ is this file.",
            "items": {"type": ["string", "object"]},
        },
        "run": {
            "type": "object",
            "description": "How this run is called, where its files go, and who waits for it.",
            "additionalProperties": False,
            "properties": {
                name: {"type": ["string", "null"], "description": text}
                for name, text in texts.items()
            }
            | {name: {"type": "boolean", "description": text} for name, text in switches.items()},
        },
    }


def _loosen(node: Any) -> Any:
    """Return a schema in which no key is required and any scalar may be an interpolation.

    A part of a recipe rarely says which member of a union it is, so one of
    several that fit is as good as exactly one. Annotations stay on top, where
    an editor shows them.
    """
    if isinstance(node, list):
        return [_loosen(item) for item in node]
    if not isinstance(node, dict):
        return node
    shown = {key: node[key] for key in _ANNOTATIONS if key in node}
    loose = {
        key: _loosen(value)
        for key, value in node.items()
        if key not in {"required", "discriminator", "oneOf", "properties", *_ANNOTATIONS}
    }
    if "properties" in node:
        loose["properties"] = {name: _loosen(value) for name, value in node["properties"].items()}
    if "oneOf" in node:
        loose["anyOf"] = _loosen(node["oneOf"])
    is_scalar = node.get("type") in {"integer", "number", "boolean"} or (
        node.get("type") == "string" and ("enum" in node or "const" in node)
    )
    return {**shown, "anyOf": [loose, _INTERPOLATION]} if is_scalar else {**shown, **loose}


def _add_defaults(properties: _Node, definitions: _Node) -> None:
    """Add to each key the default that it has in a shipped file.

    A section has none of its own: its keys have.
    """
    root = {key: value for key, value in _read("launcher").items() if key in properties}
    sections = [({"properties": properties}, root)]
    sections += [(definitions[name], _read(file)) for name, file in _DEFAULTS.items()]
    for name, file in _MODELS.items():
        values = _read(file)
        sections.append((definitions[name], {key: values[key] for key in _MODEL_KEYS}))
    for section, values in sections:
        for node, value in _leaves(section, values, definitions):
            node["default"] = value


def _describe_tiers(definitions: _Node) -> None:
    """Say of each key of tiered checkpointing with which tiers its default is another one."""
    for path in sorted((shipped_folder() / "conf" / _TIERED).glob("[!_]*.yaml")):
        changed = yaml.safe_load(path.read_text("utf-8"))
        del changed["defaults"]
        for node, value in _leaves(definitions["TieredSettings"], changed, definitions):
            if value != node["default"]:
                shown = value if isinstance(value, str) else json.dumps(value)
                node["description"] += f" With {_TIERED}={path.stem} the default is {shown}."


def _leaves(
    section: _Node, values: Mapping[str, Any], definitions: _Node
) -> Iterator[tuple[_Node, Any]]:
    """Yield the property and the value of each key that has a value and is no section."""
    for key, value in values.items():
        node = section["properties"][key]
        below = _section_of(node, definitions)
        if below is not None and isinstance(value, dict):
            yield from _leaves(below, value, definitions)
        elif value != "???":
            yield node, value


def _section_of(node: _Node, definitions: _Node) -> _Node | None:
    """Return the section that a property is or may be, None where it is none or one of several."""
    if "properties" in node:
        return node
    names = [
        part["$ref"].rpartition("/")[2] for part in node.get("anyOf", [node]) if "$ref" in part
    ]
    return definitions[names[0]] if len(names) == 1 else None


def _read(file: str) -> dict[str, Any]:
    """Return the values of a shipped file of conf/ over those of the files that it begins with."""
    path = shipped_folder() / "conf" / f"{file}.yaml"
    own = yaml.safe_load(path.read_text("utf-8"))
    # A mapping selects from another group, which has a section of its own here.
    parents = [each for each in own.pop("defaults", ()) if isinstance(each, str)]
    folder = file.rpartition("/")[0]
    below = [_read(f"{folder}/{each}") for each in parents if each != "_self_"]
    merged = OmegaConf.to_container(OmegaConf.merge(*below, own))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}

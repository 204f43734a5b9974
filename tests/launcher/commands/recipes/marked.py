"""Ask a config back where its values come from: whoever is said to have set one, sets another.

Each value is written anew at the file and line, or in the override, that `explain` names. Then the
config has the new value in this key, if it was the right place, and in no other.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launcher.composition.compose import compose_recipe, fold_recipe
from launcher.composition.shown import shown_content, written_content
from launcher.paths import shipped_folder
from launcher.provenance.explained import THE_LAUNCHER, Explained, Explainer
from launcher.provenance.place import key_of, leaves

_FLOW_VALUE = r"\{[^{}]*\}|\[[^\[\]]*\]|\"[^\"]*\"|[^,{}\[\]]*"
_BLOCK_VALUE = r"\{[^{}]*\}|\[[^\[\]]*\]|\"[^\"]*\"|[^#]*"


def copy_shipped(folder: Path) -> None:
    """Make a team's folder in which every shipped file can be changed."""
    for name in ("conf", "recipes"):
        shutil.copytree(shipped_folder() / name, folder / name)


def explain(recipe: str, overrides: Sequence[str], folder: Path) -> list[Explained]:
    config, _ = compose_recipe(recipe, overrides, folder)
    written = written_content(config)
    folded = fold_recipe(recipe, overrides, folder)
    return Explainer(written, shown_content(written), folded).explain()


def wrong_origins(
    explained: Sequence[Explained], recipe: str, overrides: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Return each key whose origin is unknown or not the right one, with what was seen instead.

    The files of the folder are changed, all of which have to be below it.
    """
    found = [each for each in explained if _has_one_value(each) and each.origin is not THE_LAUNCHER]
    marks = {each.key: f"mark{number}" for number, each in enumerate(found)}
    wrong = {each.key: each.origin for each in found if each.origin is None}
    changed = list(overrides)
    for each in found:
        if each.origin is None:
            continue
        if each.origin.path is not None:
            _mark_line(Path(each.origin.path), each.origin.line or 0, each.key, marks[each.key])
        else:
            at = overrides.index(each.origin.override or "")
            if not _mark_override(changed, at, each.key, marks[each.key]):
                del marks[each.key]
    config, _ = compose_recipe(recipe, changed, folder)
    seen = {key_of(place): value for place, value in leaves(OmegaConf.to_container(config))}
    return wrong | {key: seen.get(key) for key, mark in marks.items() if seen.get(key) != mark}


def _has_one_value(each: Explained) -> bool:
    """Return whether another text may stand for a value: it decides nothing about other keys.

    Nor is it one of several in a line.
    """
    return each.written not in ({}, []) and not each.key.endswith("]")


def _mark_line(path: Path, line: int, key: str, mark: str) -> None:
    lines = path.read_text("utf-8").split("\n")
    name = re.escape(re.split(r"[.\]\[]", key.rstrip("]"))[-1])
    text = lines[line - 1]
    is_flow = re.search(rf"(?<!\$)[{{\[].*\b{name}:", text)
    value = _FLOW_VALUE if is_flow else _BLOCK_VALUE
    lines[line - 1], count = re.subn(
        rf"(?<![\w.-])(\"?{name}\"?:\s*)({value})", rf"\g<1>{mark} ", text, count=1
    )
    assert count == 1, f"{path}, line {line} does not set {key}: {text!r}"
    path.write_text("\n".join(lines), "utf-8")


def _mark_override(overrides: list[str], at: int, key: str, mark: str) -> bool:
    """Give an override another value; return False for one that sets several keys at once."""
    name, _, _ = overrides[at].partition("=")
    assert key == name.lstrip("+") or key.startswith(f"{name.lstrip('+')}."), (key, overrides[at])
    if key != name.lstrip("+"):
        return False
    overrides[at] = f"{name}={mark}"
    return True


def yaml_lines(content: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield sections as people write them, a line for each key."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"

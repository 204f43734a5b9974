"""Refuse what a recipe's file tells Hydra, but for a sweep: Hydra imports and calls what it names.

Rendering a recipe that somebody else wrote would run their code otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import Container, OmegaConf

from launcher.errors import RecipeError
from launcher.paths import shipped_folder
from launcher.provenance.lines import parse_lines

HYDRA = "hydra"
"""The section of Hydra's own settings, of which a job has nothing."""
_MODES = (("mode", "RUN"), ("mode", "MULTIRUN"))
_FOR_HYDRA = (
    "allowed in a file: hydra.mode, hydra.sweep and hydra.sweeper.params; Hydra's other settings "
    "are taken from the command line alone"
)


def check_hydra_words(
    content: Container | Mapping[str, Any],
    path: object,
    text: str,
    name: str = "",
    place: tuple[str, ...] = (),
) -> None:
    """Refuse what a file tells Hydra, but for a sweep: Hydra would import and call what it names.

    `name` is the file's path below conf/. `text` is what was read, and holds the content at
    `place`. Raises RecipeError with a line for each word.
    """
    if "hydra" not in f"{name}{text}" and "\\" not in text:
        return
    plain = OmegaConf.to_container(content) if isinstance(content, Container) else content
    package = "\n".join(re.findall(r"#\s*(@package.*hydra.*)", text))
    # A team's root may repeat what ours says.
    root = shipped_folder() / "conf" / "launcher.yaml"
    ours = OmegaConf.to_container(OmegaConf.load(root)) if name == root.stem else {}
    found = list(_hydra_words(plain, ours)) if isinstance(plain, Mapping) else []
    if package or HYDRA in name.split("/")[:-1]:
        found.append(((), package or f"{name} among Hydra's own groups"))
    problems = []
    for words, shown in found:
        lines = parse_lines(text)
        for key in (*place, *words):
            lines = lines.below(key)
        problems.append(f"{path}, line {lines.line or 1}: {shown}; {_FOR_HYDRA}")
    if problems:
        raise RecipeError("\n".join(problems))


def _hydra_words(
    content: Mapping[Any, Any], taken: Any
) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield the place and the name of each word for Hydra that no file may hold, unless taken."""
    said = content.get(HYDRA, {})
    if not isinstance(said, Mapping):
        yield (HYDRA,), HYDRA
        said = {}
    for key, value in said.items():
        is_sweep = (key == "sweep" and isinstance(value, Mapping)) or (key, value) in _MODES
        if is_sweep or (taken and taken[HYDRA].get(key) == value):
            continue
        is_params = key == "sweeper" and isinstance(value, Mapping) and set(value) == {"params"}
        if is_params and isinstance(params := value["params"], Mapping):
            # Each is an override.
            named = [each for each in params if HYDRA in str(each)]
            yield from (((HYDRA, key, "params", n), f"hydra.{key}.params.{n}") for n in named)
        else:
            yield (HYDRA, key), f"hydra.{key}"
    entries = content.get("defaults")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        # A group or a package, and behind an @ a package alone.
        named_groups = " ".join(map(str, entry)) if isinstance(entry, Mapping) else ""
        is_told = HYDRA in named_groups or re.search(f"@.*{HYDRA}", str(entry))
        if is_told and not (taken and entry in taken["defaults"]):
            yield ("defaults", index), f"{entry} in its defaults"

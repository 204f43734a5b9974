"""Refuse what a recipe's file tells Hydra, but for a sweep: Hydra imports and calls what it names.

Rendering a recipe that somebody else wrote would run their code otherwise, write outside the
current folder, or choose by the machine's variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf

from launcher.composition.references import foreign_resolvers
from launcher.errors import RecipeError
from launcher.paths import lies_below, shipped_folder
from launcher.provenance.lines import parse_lines
from launcher.written.overrides import keep_text
from launcher.written.texts import is_text_place, text_package_problem

HYDRA = "hydra"
"""The section of Hydra's own settings, of which a job has nothing."""
_MODES = (("mode", "RUN"), ("mode", "MULTIRUN"))
_FOR_HYDRA = (
    "allowed in a file: hydra.mode, hydra.sweep.dir (a folder below the current one) and "
    "hydra.sweeper.params (env and labels quoted twice), without $; the rest is for a command line"
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
    if not re.search(r"hydra|defaults|\\", f"{name}\n{text}"):
        return
    plain = OmegaConf.to_container(content) if isinstance(content, Container) else content
    package = "\n".join(re.findall(r"#\s*(@package.*hydra.*)", text))
    # A team's root may repeat what ours says.
    root = shipped_folder() / "conf" / "launcher.yaml"
    ours = OmegaConf.to_container(OmegaConf.load(root)) if name == root.stem else {}
    if not isinstance(plain, Mapping):
        return
    found = list(_hydra_words(plain, ours))
    if package or HYDRA in name.split("/")[:-1]:
        found.append(((), package or f"{name} among Hydra's own groups"))
    header = re.search(r"^\s*#\s*@package\s+(\S+)", text, re.MULTILINE)
    here = header[1] if header else name.rpartition("/")[0].replace("/", ".")
    found = [(words, f"{shown}; {_FOR_HYDRA}") for words, shown in found]
    found += _wrong_entries(plain.get("defaults"), here, ours)
    problems = []
    for words, problem in found:
        lines = parse_lines(text)
        for key in (*place, *words):
            lines = lines.below(key)
        problems.append(f"{path}, line {lines.line or 1}: {problem}")
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
        if (key, value) in _MODES or (taken and taken[HYDRA].get(key) == value):
            continue
        is_params = key == "sweeper" and isinstance(value, Mapping) and set(value) == {"params"}
        if is_params and isinstance(params := value["params"], Mapping):
            for name, each in params.items():
                # Each is an override.
                word, is_text = f"{name}={each}", is_text_place(re.split(r"[+.]", str(name)))
                is_changed = is_text and not (isinstance(each, str) and keep_text(word) == word)
                if re.search(r"hydra|\$|@[^=]*=", word) or is_changed:
                    yield (HYDRA, key, "params", name), f"hydra.{key}.params.{name}"
        elif key == "sweep" and isinstance(value, Mapping):
            for name, each in value.items():
                if name != "dir" or "$" in str(each) or not lies_below(str(each), Path.cwd()):
                    yield (HYDRA, key, name), f"hydra.sweep.{name} {each}"
        else:
            yield (HYDRA, key), f"hydra.{key}"


def _wrong_entries(
    entries: object, here: str, taken: Any
) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield the place of each wrong entry of a defaults list, and what is wrong with it.

    `here` is the section that the list's file lies in.
    """
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        shown = f"{entry} in its defaults"
        # A group or a package, and behind an @ a package alone.
        named_groups = " ".join(map(str, entry)) if isinstance(entry, Mapping) else ""
        is_told = HYDRA in named_groups or re.search(f"@.*{HYDRA}", str(entry))
        if is_told and not (taken and entry in taken["defaults"]):
            yield ("defaults", index), f"{shown}; {_FOR_HYDRA}"
        if name := next(foreign_resolvers(str(entry)), None):
            yield ("defaults", index), f"{shown} chooses by ${{{name}:...}}; write the name itself"
        if problem := text_package_problem(str(entry).replace("_here_", here), shown):
            yield ("defaults", index), problem
